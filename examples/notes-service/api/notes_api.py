"""A small HTTP API over the notes database.

GET /healthz      {"notes": 1000}
GET /notes/7      one note, or 404
GET /notes?q=ink  up to 20 notes whose title or body holds the word
"""

import json
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import psycopg2
import psycopg2.extras

DATABASE = "host=127.0.0.1 dbname=notes user=notes connect_timeout=5"
ADDRESS = ("0.0.0.0", 8000)  # a published port reaches the machine from outside
NOTE_PATH = re.compile(r"/notes/([0-9]{1,9})")
COLUMNS = "id, title, body, created::text AS created"


class Notes:
    """The notes table, over one connection that is opened again when it breaks.

    The open connection is part of the checkpoint: both of its ends are inside the machine, so a
    fork goes on using it.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._connection = None

    def count(self):
        return self._rows("SELECT count(*) AS notes FROM notes")[0]

    def one(self, number):
        rows = self._rows(f"SELECT {COLUMNS} FROM notes WHERE id = %s", number)
        return rows[0] if rows else None

    def search(self, word):
        pattern = "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        return self._rows(
            f"SELECT {COLUMNS} FROM notes"
            " WHERE title ILIKE %s OR body ILIKE %s ORDER BY id LIMIT 20",
            pattern,
            pattern,
        )

    def _rows(self, query, *values):
        with self._lock:
            try:
                return self._ask(query, values)
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                self._connection = None
                return self._ask(query, values)

    def _ask(self, query, values):
        if self._connection is None:
            self._connection = psycopg2.connect(DATABASE)
            self._connection.autocommit = True
        with self._connection.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
            cursor.execute(query, values)
            return cursor.fetchall()


NOTES = Notes()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self):
        url = urlsplit(self.path)
        try:
            status, answer = self._answer(url.path, parse_qs(url.query))
        except psycopg2.Error as error:
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error).strip()}
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, path, query):
        if path == "/healthz":
            return HTTPStatus.OK, NOTES.count()
        if path == "/notes":
            return HTTPStatus.OK, NOTES.search(query.get("q", [""])[0])
        match = NOTE_PATH.fullmatch(path)
        note = NOTES.one(int(match[1])) if match else None
        if note is not None:
            return HTTPStatus.OK, note
        return HTTPStatus.NOT_FOUND, {"error": f"nothing at {path}"}

    def log_message(self, *_):
        """Say nothing: every line would be memory in the checkpoint."""


if __name__ == "__main__":
    ThreadingHTTPServer(ADDRESS, Handler).serve_forever()
