CREATE ROLE notes LOGIN;
CREATE DATABASE notes OWNER notes;
\connect notes notes
CREATE TABLE notes (
    id integer PRIMARY KEY,
    title text NOT NULL,
    body text NOT NULL,
    created date NOT NULL
);
\copy notes FROM '/srv/seed/notes.csv' WITH (FORMAT csv, HEADER true)
ANALYZE notes;
