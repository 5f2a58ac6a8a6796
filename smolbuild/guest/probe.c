/* Probes that start no process: a TCP port, an HTTP answer, a file; once, or until a deadline. */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_PROBES = 32, TEXT = 400 };
enum kind { P_PORT = 1, P_HTTP, P_FILE };
enum state { WAITING, CONNECTING, SENDING, READING };

struct probe {
	bool used;
	enum kind kind;
	enum state state;
	struct stream *stream;
	char *host, *path, *contains;
	uint32_t port, status, timeout, interval;
	int64_t began, deadline, next_at, attempt_until;
	uint32_t attempts;
	int fd, slot;
	char *request;
	size_t request_len, request_at;
	char *body; /* head and body of the answer */
	size_t len;
	char detail[TEXT];
};

static struct probe probes[MAX_PROBES];

static void stop(struct probe *p)
{
	if (p->fd >= 0)
		close(p->fd);
	free(p->body);
	free(p->request);
	p->fd = p->slot = -1;
	p->body = p->request = NULL;
	p->len = 0;
}

static void release(struct probe *p)
{
	stop(p);
	free(p->host);
	free(p->path);
	free(p->contains);
	*p = (struct probe){ 0 };
}

static void on_input(void *owner)
{
	stream_drain(((struct probe *)owner)->stream, -1);
}

static void on_gone(void *owner)
{
	release(owner);
}

static const struct stream_owner calls = { on_input, on_gone };

static void answer(struct probe *p, bool ok)
{
	struct result out = { 0 };
	add_u8(&out, ok);
	add_text(&out, p->detail);
	add_u32(&out, p->attempts);
	add_u64(&out, (uint64_t)(now_ms() - p->began));
	stream_result(p->stream, C_OK, NULL, &out);
	result_free(&out);
	release(p);
}

/* An attempt ended. */
static void done(struct probe *p, bool ok)
{
	int64_t now = now_ms();
	stop(p);
	if (ok || !p->deadline || now + p->interval >= p->deadline) {
		answer(p, ok);
		return;
	}
	p->state = WAITING;
	p->next_at = now + p->interval;
}

static void printable(char *text)
{
	for (; *text; text++)
		if (*text < ' ' || *text > '~')
			*text = '.';
}

static socklen_t address(const struct probe *p, struct sockaddr_storage *to)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)to;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)to;
	const char *host = strcmp(p->host, "localhost") == 0 ? "127.0.0.1" : p->host;
	*to = (struct sockaddr_storage){ 0 };
	if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons((uint16_t)p->port);
		return sizeof *v4;
	}
	if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons((uint16_t)p->port);
		return sizeof *v6;
	}
	return 0;
}

static void failed(struct probe *p, int error)
{
	snprintf(p->detail, TEXT, "%s:%u: %s", p->host, p->port, strerror(error));
	done(p, false);
}

static void connected(struct probe *p)
{
	if (p->kind == P_PORT) {
		snprintf(p->detail, TEXT, "%s:%u accepted a connection", p->host, p->port);
		done(p, true);
		return;
	}
	/* HTTP/1.0: the body comes unchunked and the server closes the connection. */
	bool v6 = strchr(p->host, ':');
	int len = asprintf(&p->request,
			   "GET %s HTTP/1.0\r\nHost: %s%s%s:%u\r\nUser-Agent: smolbuild\r\n"
			   "Accept: */*\r\nConnection: close\r\n\r\n",
			   p->path, v6 ? "[" : "", p->host, v6 ? "]" : "", p->port);
	if (len < 0)
		must(NULL);
	p->request_len = (size_t)len;
	p->request_at = 0;
	p->body = must(malloc(BODY + 1));
	p->state = SENDING;
}

static void attempt(struct probe *p)
{
	struct sockaddr_storage to;
	struct stat st;
	int64_t now = now_ms();
	p->attempts++;
	p->attempt_until = now + p->timeout;
	if (p->deadline && p->attempt_until > p->deadline)
		p->attempt_until = p->deadline;
	if (p->kind == P_FILE) {
		bool there = stat(p->path, &st) == 0;
		snprintf(p->detail, TEXT, "%s %s", p->path, there ? "exists" : strerror(errno));
		done(p, there);
		return;
	}
	socklen_t len = address(p, &to);
	p->fd = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (p->fd < 0) {
		failed(p, errno);
		return;
	}
	p->state = CONNECTING;
	if (connect(p->fd, (struct sockaddr *)&to, len) == 0)
		connected(p);
	else if (errno != EINPROGRESS)
		failed(p, errno);
}

static uint32_t status_of(const char *head)
{
	unsigned status;
	return sscanf(head, "HTTP/%*u.%*u %3u", &status) == 1 ? status : 0;
}

/* Looks at what has come so far; true when the attempt is decided. */
static bool judge(struct probe *p, bool complete)
{
	p->body[p->len] = 0;
	char *end = strstr(p->body, "\r\n\r\n"), *line = strstr(p->body, "\r\n");
	char *content = end ? end + 4 : p->body + p->len;
	size_t size = p->len - (size_t)(content - p->body);
	if (!line && !complete)
		return false;
	uint32_t status = status_of(p->body);
	const char *length = end ? strcasestr(p->body, "\r\ncontent-length:") : NULL;
	if (length && length < end && size >= strtoul(length + 17, NULL, 10))
		complete = true;
	int used = snprintf(p->detail, TEXT, "GET http://%s:%u%.120s: ", p->host, p->port, p->path);
	char *rest = p->detail + used;
	size_t left = TEXT - (size_t)used;
	if (status != p->status) {
		if (status)
			snprintf(rest, left, "status %u, expected %u", status, p->status);
		else
			snprintf(rest, left, "no HTTP answer");
		done(p, false);
		return true;
	}
	if (!*p->contains || (end && memmem(content, size, p->contains, strlen(p->contains)))) {
		snprintf(rest, left, "status %u", status);
		done(p, true);
		return true;
	}
	if (!complete)
		return false;
	snprintf(rest, left, "status %u, but the body has no \"%.80s\": %.80s", status, p->contains,
		 content);
	printable(p->detail);
	done(p, false);
	return true;
}

static void proceed(struct probe *p)
{
	if (p->state == CONNECTING) {
		int error = 0;
		socklen_t size = sizeof error;
		getsockopt(p->fd, SOL_SOCKET, SO_ERROR, &error, &size);
		if (error) {
			failed(p, error);
			return;
		}
		connected(p);
		if (!p->used || p->state != SENDING)
			return;
	}
	if (p->state == SENDING) {
		ssize_t n = send(p->fd, p->request + p->request_at, p->request_len - p->request_at,
				 MSG_NOSIGNAL);
		if (n < 0 && errno != EAGAIN) {
			failed(p, errno);
			return;
		}
		p->request_at += n > 0 ? (size_t)n : 0;
		if (p->request_at == p->request_len)
			p->state = READING;
		return;
	}
	ssize_t n = recv(p->fd, p->body + p->len, BODY - p->len, 0);
	if (n < 0 && errno == EAGAIN)
		return;
	if (n < 0) {
		failed(p, errno);
		return;
	}
	p->len += (size_t)n;
	judge(p, n == 0 || p->len == BODY);
}

static void late(struct probe *p)
{
	if (p->state == READING && p->len && judge(p, false))
		return;
	snprintf(p->detail, TEXT, "%s:%u: no answer within %u ms", p->host, p->port, p->timeout);
	done(p, false);
}

static bool valid(const struct probe *p)
{
	struct sockaddr_storage to;
	if (p->kind == P_FILE)
		return *p->path == '/';
	if (p->kind != P_PORT && p->kind != P_HTTP)
		return false;
	for (const char *c = p->path; *c; c++) /* nothing may end the request line early */
		if (*c <= ' ' || *c > '~')
			return false;
	return p->port > 0 && p->port < 65536 && address(p, &to) &&
		(p->kind == P_PORT || *p->path == '/');
}

void probe_request(struct stream *s, struct reader *in)
{
	struct probe *p = NULL;
	for (int i = 0; i < MAX_PROBES && !p; i++)
		if (!probes[i].used)
			p = &probes[i];
	if (!p) {
		stream_result(s, C_LIMIT, "too many probes at once", NULL);
		return;
	}
	*p = (struct probe){ .used = true, .fd = -1, .slot = -1, .began = now_ms(), .stream = s };
	p->kind = read_u8(in);
	p->host = read_text(in, 255);
	p->port = read_u32(in);
	p->path = read_text(in, 4096);
	p->status = read_u32(in);
	p->contains = read_text(in, 4096);
	p->timeout = read_u32(in);
	p->interval = read_u32(in);
	uint32_t until = read_u32(in);
	if (in->bad || !valid(p)) {
		stream_result(s, C_BAD_REQUEST,
			      "malformed probe: an address (or localhost), a port, an absolute path",
			      NULL);
		release(p);
		return;
	}
	if (p->timeout < 1)
		p->timeout = 1;
	if (p->interval < 1)
		p->interval = 1;
	p->deadline = until ? p->began + until : 0;
	stream_own(s, &calls, p);
	attempt(p);
}

void probes_poll(void)
{
	for (struct probe *p = probes; p < probes + MAX_PROBES; p++) {
		if (!p->used)
			continue;
		p->slot = -1;
		if (p->state == WAITING) {
			wake_at(p->next_at);
			continue;
		}
		p->slot = watch(p->fd, p->state == READING ? POLLIN : POLLOUT);
		wake_at(p->attempt_until);
	}
}

void probes_serve(void)
{
	for (struct probe *p = probes; p < probes + MAX_PROBES; p++) {
		if (!p->used)
			continue;
		if (p->state == WAITING) {
			if (now_ms() >= p->next_at)
				attempt(p);
		} else if (ready(p->slot)) {
			p->slot = -1;
			proceed(p);
		} else if (now_ms() >= p->attempt_until) {
			late(p);
		}
	}
}
