/* The guest agent: what its files share. The protocol is described in docs/agent-protocol.md. */
#ifndef SMOLBUILD_AGENT_H
#define SMOLBUILD_AGENT_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PROTOCOL_VERSION 1

enum {
	MAGIC = 0x4253,
	HEADER = 16,            /* bytes of a frame header */
	MAX_PAYLOAD = 262144,   /* no frame carries more; argv and env of one exec must fit */
	MAX_DATA = 16384,       /* what one DATA frame of ours carries at most */
	WINDOW = 262144,        /* DATA bytes per stream and direction before a CREDIT is needed */
	TX_HIGH = 262144,       /* unsent bytes above which nothing more is read to be sent */
	TX_FULL = 1048576,      /* unsent bytes above which no request is read either */
	MAX_STREAMS = 256,
	MAX_JOBS = 128,
	MAX_RECORDS = 65536,    /* exec ids are never forgotten; at this many, new ones are refused */
	MAX_ID = 64,            /* bytes of an exec id */
	MAX_ARGS = 4096,
	RING = 65536,           /* output kept of a service */
	BODY = 65536,           /* bytes of an HTTP answer that a probe looks at */
	DRAIN_MS = 2000,        /* after the end of an exec, wait so long for its pipes to close */
};

enum frame { F_HELLO = 1, F_REQUEST, F_DATA, F_EOF, F_CREDIT, F_RESET, F_RESULT, F_OPEN, F_FAULT };

enum op {
	OP_PING = 1, OP_EXEC, OP_KILL, OP_STATUS, OP_OUTPUT, OP_PUT, OP_GET, OP_PROBE, OP_FRESHEN,
	OP_IDENTITY, OP_FREEZE, OP_THAW, OP_SYNC, OP_QUIESCE, OP_TUNNELS, OP_SHUTDOWN, OP_RESIZE,
	OP_SECRETS = 32, OP_ZERO_FREE,
	OP_SURVEY = 48,
};

enum code {
	C_OK, C_BAD_REQUEST, C_UNKNOWN, C_BUSY, C_SYSTEM, C_DEADLINE, C_NOT_A_GUEST, C_LIMIT,
};

enum channel { CH_IN = 0, CH_OUT = 1, CH_ERR = 2 };

/* main.c */
extern bool is_guest; /* false: an ordinary program that serves a descriptor, for tests */
int64_t now_ms(void);
void fill_descriptors(void);
int watch(int fd, short events);   /* returns the slot to ask `ready` about after the poll */
short ready(int slot);
void wake_at(int64_t when_ms);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *must(void *allocated); /* out of memory in pid 1 ends the machine, loudly */

/* port.c: bytes from and to the host */
struct reader {
	const uint8_t *at;
	size_t left;
	bool bad;
};
struct result { /* starts as zeros; small ones need no allocation, which a cold fork pays for */
	uint8_t *data;
	size_t len, size;
	uint8_t small[256];
};
void port_open(int fd);
void port_poll(void);
void port_serve(void);
bool port_congested(void);
bool port_flush(int64_t until_ms);
void port_send(enum frame type, uint8_t channel, uint32_t stream, const void *data, size_t len);
uint8_t read_u8(struct reader *in);
uint32_t read_u32(struct reader *in);
uint64_t read_u64(struct reader *in);
const uint8_t *read_bytes(struct reader *in, size_t len);
char *read_text(struct reader *in, size_t max); /* fresh, without NUL inside; NULL and bad else */
bool read_into(struct reader *in, char *text, size_t size); /* the same, without an allocation */
void add_u8(struct result *out, uint8_t value);
void add_u32(struct result *out, uint32_t value);
void add_u64(struct result *out, uint64_t value);
void add_bytes(struct result *out, const void *data, size_t len);
void add_text(struct result *out, const char *text);
void result_free(struct result *out);

/* stream.c: what a request or a tunnel owns of the connection */
struct stream;
struct stream_owner {
	void (*input)(void *owner);  /* bytes or an end arrived */
	void (*gone)(void *owner);   /* the host abandoned the stream; it is already freed */
};
struct stream *stream_find(uint32_t id);
struct stream *stream_open(uint32_t id);
uint32_t stream_id(const struct stream *s);
void stream_own(struct stream *s, const struct stream_owner *calls, void *owner);
size_t stream_credit(const struct stream *s);
void stream_grant(struct stream *s, uint32_t bytes);
bool stream_accept(struct stream *s, const uint8_t *data, size_t len);
void stream_ended(struct stream *s);
bool stream_has_input(const struct stream *s);
bool stream_at_end(const struct stream *s);
int stream_drain(struct stream *s, int fd);  /* to fd, or away when fd < 0; -1: fd broke */
void stream_data(struct stream *s, uint8_t channel, const void *data, size_t len);
void stream_eof(struct stream *s);
void stream_result(struct stream *s, enum code code, const char *detail, const struct result *out);
void stream_reset(struct stream *s, const char *why);
void stream_close(struct stream *s);
void stream_drop_all(void);
int stream_count(void);

/* request.c */
void request(struct stream *s, struct reader *in);
void epoch_began(void);

/* record.c: exec ids and what became of them */
struct record {
	char *id;
	bool ended, timed_out;
	int status;
	struct job *job; /* NULL when nothing of it is left */
};
struct record *record_find(const char *id);
struct record *record_add(const char *id); /* NULL: the table is full */

/* job.c: child processes */
struct window {
	uint32_t rows, columns;
};
struct job {
	bool used, keep, exited, timed_out, cgroup, tty;
	uint32_t serial;
	struct record *record;
	struct stream *stream;
	pid_t pid;
	int status;
	int fd[3];   /* our ends: stdin, stdout, stderr; of a terminal the first two; -1: closed */
	int slot[3];
	int64_t deadline, drain_until;
	uint8_t *ring;
	size_t ring_len, ring_at;
	bool quiet;  /* a worker: its stderr is kept for the error, not streamed */
	void (*finish)(struct job *job); /* sends the RESULT when there is a stream */
};
struct job *job_start(int (*child)(void *), void *argument, bool with_stdin,
		      const struct window *window, uint64_t timeout_ms); /* window: at a terminal */
void job_attach(struct job *job, struct stream *s);
void job_kill(struct job *job);
void job_ring_send(struct job *job, struct stream *s);
void job_finish_worker(struct job *job);
const struct job *job_at(int place); /* NULL: none is there */
void jobs_setup(void);
void jobs_poll(void);
void jobs_serve(void);
void jobs_reap(void);

/* pty.c */
bool pty_open(struct job *job, int ends[3], const struct window *window); /* false: close them */
bool pty_resize(int ours, const struct window *window);
bool pty_control(void);

/* exec.c */
void exec_request(struct stream *s, struct reader *in);
void kill_request(struct stream *s, struct reader *in);
void status_request(struct stream *s, struct reader *in);
void output_request(struct stream *s, struct reader *in);
void resize_request(struct stream *s, struct reader *in);

/* user.c: only called in the child */
bool become_user(const char *user, char *home, size_t home_size);
bool user_ids(const char *user, uid_t *uid, gid_t *gid);

/* untar.c, tar.c: run in a child, stdin or stdout is the archive; return the exit status */
int untar(const char *target);
int tar_path(const char *path);
void copy_request(struct stream *s, struct reader *in, bool put);

/* probe.c */
void probe_request(struct stream *s, struct reader *in);
void probes_poll(void);
void probes_serve(void);

/* tunnel.c */
uint32_t tunnel_stream(void); /* the number of the next stream that we open */
void tunnels_request(struct stream *s, struct reader *in);
void tunnels_poll(void);
void tunnels_serve(void);
void tunnels_reset(void);
void tunnels_pause(bool paused);

/* gateway.c: a namespace of the agent's own that takes what leaves the guest's */
#define GATEWAY "198.18.0.1"        /* RFC 2544: addresses that are nobody's */
#define GATEWAY_GUEST "198.18.0.2"
enum { GATEWAY_PORTS = 3 };
struct gateway {
	int listeners[GATEWAY_PORTS], count;
	int dns;         /* datagrams to port 53 of any address */
	bool all_ports;  /* else only 53, 80 and 443 are listened on */
};
bool gateway_open(struct gateway *gateway); /* false: errno says why, and nothing is left of it */

/* message.c: queries and answers of DNS */
enum {
	DNS_NAME = 254, DNS_QUERY = 512, DNS_A = 1, DNS_PTR = 12, DNS_SRV = 33,
	DNS_OK = 0, DNS_FORMAT = 1, DNS_FAILED = 2, DNS_NO_NAME = 3, DNS_UNKNOWN = 4, DNS_REFUSED = 5,
};
struct question {
	char name[DNS_NAME]; /* lower case, without a final dot */
	uint16_t type;
	size_t end;          /* of the question in the message; 0: there is none to repeat */
};
bool dns_parse(const uint8_t *query, size_t len, struct question *q, int *code);
size_t dns_answer(uint8_t *out, const uint8_t *query, const struct question *q, int code,
		  const uint32_t *address); /* out has room for DNS_QUERY bytes; NULL: no address */

/* dns.c */
void dns_open(int fd);
void dns_connection(int fd);
void dns_enable(bool enabled);
bool dns_name_of(uint32_t address, const char **name); /* of an address in network byte order */
void dns_reset(void);
void dns_pause(bool paused);
void dns_poll(void);
void dns_serve(void);

/* identity.c */
enum identity { ID_HOSTNAME, ID_MACHINE, ID_BOOT, ID_DBUS };
enum { UUID_SIZE = 37 };
void read_line(const char *path, char *line, size_t size);
bool identity_prepare(bool may_create);
bool identity_prepared(void);
bool identity_set(enum identity which, const char *value);
bool new_uuid(char text[UUID_SIZE]);

/* fixup.c */
/* Before a save: what a freshen needs is ready and open; with names, what a renaming one needs. */
void fixup_prepare(bool names);
void freshen_request(struct stream *s, struct reader *in);
void identity_request(struct stream *s);
void thaw_request(struct stream *s);
void worker_request(struct stream *s, struct reader *in, enum op op);
void shutdown_request(struct stream *s);
void worker_start(struct stream *s, int (*work)(void *), void *argument, uint32_t timeout);

/* scrub.c */
void zero_free_request(struct stream *s, struct reader *in);

/* secrets.c */
void secrets_request(struct stream *s, struct reader *in);
bool secrets_to_environment(void); /* in the child of an execution that is given them */

/* survey.c */
void survey_request(struct stream *s, struct reader *in);

/* network.c */
void network(void);
bool interface_at(const char *name, const char *address, const char *mask);
bool default_route(const char *gateway);
void resolver(const char *address);
bool leave_network(void); /* of the calling process; says why not on its standard error */

/* boot.c */
int boot(void); /* mounts, modules, network; returns the port to the host, or never */
bool write_file(const char *path, const char *text, mode_t mode);

#endif
