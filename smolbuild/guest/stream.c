/* Streams: a request's or a tunnel's share of the connection, with credit in both directions. */
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct stream {
	bool used, ended;
	uint32_t id;
	size_t credit; /* DATA bytes that the host lets us send */
	size_t window; /* DATA bytes that we let the host send */
	uint8_t *in;
	size_t in_at, in_len;
	const struct stream_owner *calls;
	void *owner;
};

static struct stream streams[MAX_STREAMS];

struct stream *stream_find(uint32_t id)
{
	for (int i = 0; i < MAX_STREAMS; i++)
		if (streams[i].used && streams[i].id == id)
			return &streams[i];
	return NULL;
}

struct stream *stream_open(uint32_t id)
{
	for (int i = 0; i < MAX_STREAMS; i++)
		if (!streams[i].used) {
			streams[i] = (struct stream){
				.used = true, .id = id, .credit = WINDOW, .window = WINDOW
			};
			return &streams[i];
		}
	port_send(F_RESET, 0, id, "too many streams", 16);
	return NULL;
}

/* Whatever a program sends or gets may be a secret: freed memory of ours keeps nothing. */
static void wipe(uint8_t *data, size_t len)
{
	if (data)
		explicit_bzero(data, len);
	free(data);
}

static void release(struct stream *s)
{
	wipe(s->in, s->in_at + s->in_len);
	*s = (struct stream){ 0 };
}

uint32_t stream_id(const struct stream *s)
{
	return s->id;
}

void stream_own(struct stream *s, const struct stream_owner *calls, void *owner)
{
	s->calls = calls;
	s->owner = owner;
}

size_t stream_credit(const struct stream *s)
{
	return s->credit;
}

void stream_grant(struct stream *s, uint32_t bytes)
{
	s->credit += bytes;
	if (s->credit > WINDOW)
		s->credit = WINDOW;
}

bool stream_accept(struct stream *s, const uint8_t *data, size_t len)
{
	if (len > s->window || s->ended)
		return false;
	if (!len)
		return true;
	s->window -= len;
	uint8_t *larger = must(malloc(s->in_len + len));
	if (s->in_len)
		memcpy(larger, s->in + s->in_at, s->in_len);
	wipe(s->in, s->in_at + s->in_len);
	s->in = larger;
	s->in_at = 0;
	memcpy(s->in + s->in_len, data, len);
	s->in_len += len;
	if (s->calls)
		s->calls->input(s->owner);
	return true;
}

void stream_ended(struct stream *s)
{
	s->ended = true;
	if (s->calls)
		s->calls->input(s->owner);
}

bool stream_has_input(const struct stream *s)
{
	return s->in_len > 0;
}

bool stream_at_end(const struct stream *s)
{
	return s->ended && !s->in_len;
}

static void consumed(struct stream *s, size_t len)
{
	uint8_t grant[4];
	s->in_at += len;
	s->in_len -= len;
	s->window += len;
	for (int i = 0; i < 4; i++)
		grant[i] = (uint8_t)(len >> (8 * i));
	if (!s->ended)
		port_send(F_CREDIT, 0, s->id, grant, sizeof grant);
	if (!s->in_len) {
		wipe(s->in, s->in_at);
		s->in = NULL;
		s->in_at = 0;
	}
}

int stream_drain(struct stream *s, int fd)
{
	while (s->in_len) {
		if (fd < 0) {
			consumed(s, s->in_len);
			return 0;
		}
		ssize_t n = write(fd, s->in + s->in_at, s->in_len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN ? 0 : -1;
		consumed(s, (size_t)n);
	}
	return 0;
}

void stream_data(struct stream *s, uint8_t channel, const void *data, size_t len)
{
	s->credit -= len < s->credit ? len : s->credit;
	port_send(F_DATA, channel, s->id, data, len);
}

void stream_eof(struct stream *s)
{
	port_send(F_EOF, 0, s->id, NULL, 0);
}

void stream_result(struct stream *s, enum code code, const char *detail, const struct result *out)
{
	struct result all = { 0 };
	add_u32(&all, code);
	add_text(&all, detail ? detail : "");
	if (out)
		add_bytes(&all, out->data, out->len);
	port_send(F_RESULT, 0, s->id, all.data, all.len);
	result_free(&all);
	release(s);
}

void stream_reset(struct stream *s, const char *why)
{
	port_send(F_RESET, 0, s->id, why, strlen(why));
	stream_close(s);
}

void stream_close(struct stream *s)
{
	const struct stream_owner *calls = s->calls;
	void *owner = s->owner;
	release(s);
	if (calls)
		calls->gone(owner);
}

void stream_drop_all(void)
{
	for (int i = 0; i < MAX_STREAMS; i++)
		if (streams[i].used)
			stream_close(&streams[i]);
}

int stream_count(void)
{
	int count = 0;
	for (int i = 0; i < MAX_STREAMS; i++)
		count += streams[i].used;
	return count;
}
