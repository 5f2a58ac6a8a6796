/* Frames: bytes from and to the host, and the fields inside a payload. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int port = -1;
static int port_slot = -1;
static int64_t hung_until; /* the host's end is closed: look again then, do not spin */
static uint32_t epoch;

static uint8_t rx[HEADER + MAX_PAYLOAD];
static size_t rx_len;
static bool scanning; /* garbage was read; the next good header ends this */

static uint8_t tx_small[8192];
static uint8_t *tx = tx_small;
static size_t tx_at, tx_len, tx_size = sizeof tx_small;

static uint32_t load32(const uint8_t *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void store32(uint8_t *p, uint32_t v)
{
	for (int i = 0; i < 4; i++)
		p[i] = (uint8_t)(v >> (8 * i));
}

void port_open(int fd)
{
	port = fd;
	fcntl(port, F_SETFL, O_NONBLOCK);
	fcntl(port, F_SETFD, FD_CLOEXEC);
}

static size_t unsent(void)
{
	return tx_len - tx_at;
}

bool port_congested(void)
{
	return unsent() >= TX_HIGH;
}

static void tx_append(const void *data, size_t len)
{
	if (!len)
		return;
	if (tx_at && tx_len + len > tx_size) {
		memmove(tx, tx + tx_at, unsent());
		tx_len -= tx_at;
		tx_at = 0;
	}
	if (tx_len + len > tx_size) {
		uint8_t *old = tx;
		tx_size = (tx_len + len + 65535) & ~(size_t)65535;
		tx = must(malloc(tx_size));
		memcpy(tx, old, tx_len);
		explicit_bzero(old, tx_len);
		if (old != tx_small)
			free(old);
	}
	memcpy(tx + tx_len, data, len);
	tx_len += len;
}

static void tx_write(void)
{
	while (unsent()) {
		ssize_t n = write(port, tx + tx_at, unsent());
		if (n <= 0) {
			if (n < 0 && errno == EINTR)
				continue;
			if (n < 0 && errno != EAGAIN)
				hung_until = now_ms() + 50;
			return;
		}
		tx_at += (size_t)n;
	}
	explicit_bzero(tx, tx_len); /* what a program wrote may have been a secret */
	tx_at = tx_len = 0;
	if (tx != tx_small) { /* nothing of a large answer stays in a checkpoint */
		free(tx);
		tx = tx_small;
		tx_size = sizeof tx_small;
	}
}

bool port_flush(int64_t until_ms)
{
	while (unsent() && now_ms() < until_ms) {
		struct pollfd p = { .fd = port, .events = POLLOUT };
		poll(&p, 1, 20);
		tx_write();
	}
	return !unsent();
}

void port_send(enum frame type, uint8_t channel, uint32_t stream, const void *data, size_t len)
{
	uint8_t header[HEADER] = { MAGIC & 255, MAGIC >> 8, (uint8_t)type, channel };
	store32(header + 4, epoch);
	store32(header + 8, stream);
	store32(header + 12, (uint32_t)len);
	tx_append(header, sizeof header);
	tx_append(data, len);
}

static void hello(struct reader *in)
{
	struct result out = { 0 };
	uint32_t newest = read_u32(in);
	add_u32(&out, PROTOCOL_VERSION);
	add_u32(&out, WINDOW);
	add_u8(&out, is_guest);
	add_u8(&out, !in->bad && newest >= PROTOCOL_VERSION);
	port_send(F_HELLO, 0, 0, out.data, out.len);
	result_free(&out);
}

static void frame(enum frame type, uint32_t id, struct reader in)
{
	struct stream *s = stream_find(id);
	switch (type) {
	case F_HELLO:
		hello(&in);
		return;
	case F_REQUEST:
		if (s || !id || id & 1) {
			port_send(F_RESET, 0, id, "stream in use", 13);
			return;
		}
		s = stream_open(id);
		if (s)
			request(s, &in);
		return;
	case F_DATA:
		if (s && !stream_accept(s, in.at, in.left))
			stream_reset(s, "more than the window allows");
		return;
	case F_EOF:
		if (s)
			stream_ended(s);
		return;
	case F_CREDIT:
		if (s)
			stream_grant(s, read_u32(&in));
		return;
	case F_RESET:
		if (s)
			stream_close(s);
		return;
	default:
		port_send(F_FAULT, 0, id, "unknown frame type", 18);
	}
}

/* A greater epoch is another life of this machine: nothing of the old one is owed to anybody. */
static bool epoch_accepts(uint32_t value)
{
	if (value < epoch)
		return false;
	if (value > epoch) {
		epoch = value;
		tx_at = tx_len = 0;
		stream_drop_all();
		epoch_began();
	}
	return true;
}

static size_t parse(const uint8_t *p, size_t len)
{
	size_t used = 0;
	while (len - used >= HEADER) {
		const uint8_t *h = p + used;
		size_t size = load32(h + 12);
		if (h[0] != (MAGIC & 255) || h[1] != MAGIC >> 8 || size > MAX_PAYLOAD) {
			if (!scanning)
				port_send(F_FAULT, 0, 0, "bad frame header", 16);
			scanning = true;
			used++;
			continue;
		}
		if (len - used < HEADER + size)
			break;
		scanning = false;
		if (epoch_accepts(load32(h + 4)))
			frame(h[2], load32(h + 8), (struct reader){ h + HEADER, size, false });
		used += HEADER + size;
	}
	return used;
}

void port_poll(void)
{
	port_slot = -1;
	if (hung_until > now_ms()) {
		wake_at(hung_until);
		return;
	}
	short events = 0;
	if (unsent() < TX_FULL)
		events |= POLLIN;
	if (unsent())
		events |= POLLOUT;
	port_slot = watch(port, events);
}

static void hung_up(void)
{
	if (!is_guest)
		exit(0);
	hung_until = now_ms() + 50;
}

void port_serve(void)
{
	short got = ready(port_slot);
	if (got & POLLIN) {
		ssize_t n = -1;
		while (rx_len < sizeof rx &&
		       (n = read(port, rx + rx_len, sizeof rx - rx_len)) > 0) {
			rx_len += (size_t)n;
			size_t used = parse(rx, rx_len), whole = rx_len;
			rx_len -= used;
			if (used && rx_len)
				memmove(rx, rx + used, rx_len);
			explicit_bzero(rx + rx_len, whole - rx_len); /* it may have been a secret */
			if (unsent() >= TX_FULL)
				break;
		}
		if (n == 0)
			hung_up();
	} else if (got & (POLLHUP | POLLERR | POLLNVAL)) {
		hung_up();
	}
	tx_write();
}

uint8_t read_u8(struct reader *in)
{
	const uint8_t *p = read_bytes(in, 1);
	return p ? *p : 0;
}

uint32_t read_u32(struct reader *in)
{
	const uint8_t *p = read_bytes(in, 4);
	return p ? load32(p) : 0;
}

uint64_t read_u64(struct reader *in)
{
	const uint8_t *p = read_bytes(in, 8);
	return p ? load32(p) | (uint64_t)load32(p + 4) << 32 : 0;
}

const uint8_t *read_bytes(struct reader *in, size_t len)
{
	if (in->bad || len > in->left) {
		in->bad = true;
		return NULL;
	}
	const uint8_t *p = in->at;
	in->at += len;
	in->left -= len;
	return p;
}

static const uint8_t *text_field(struct reader *in, size_t max, size_t *len)
{
	*len = read_u32(in);
	const uint8_t *p = *len > max ? NULL : read_bytes(in, *len);
	if (!p || memchr(p, 0, *len)) {
		in->bad = true;
		return NULL;
	}
	return p;
}

bool read_into(struct reader *in, char *text, size_t size)
{
	size_t len;
	const uint8_t *p = text_field(in, size - 1, &len);
	if (p)
		memcpy(text, p, len);
	text[p ? len : 0] = 0;
	return p != NULL;
}

char *read_text(struct reader *in, size_t max)
{
	size_t len;
	const uint8_t *p = text_field(in, max, &len);
	if (!p)
		return NULL;
	char *text = must(malloc(len + 1));
	memcpy(text, p, len);
	text[len] = 0;
	return text;
}

void add_bytes(struct result *out, const void *data, size_t len)
{
	if (!len)
		return;
	if (!out->data) {
		out->data = out->small;
		out->size = sizeof out->small;
	}
	if (out->len + len > out->size) {
		bool first = out->data == out->small;
		out->size = (out->len + len) * 2;
		out->data = must(realloc(first ? NULL : out->data, out->size));
		if (first)
			memcpy(out->data, out->small, out->len);
	}
	memcpy(out->data + out->len, data, len);
	out->len += len;
}

void result_free(struct result *out)
{
	if (out->data != out->small)
		free(out->data);
	out->data = NULL;
}

void add_u8(struct result *out, uint8_t value)
{
	add_bytes(out, &value, 1);
}

void add_u32(struct result *out, uint32_t value)
{
	uint8_t bytes[4];
	store32(bytes, value);
	add_bytes(out, bytes, sizeof bytes);
}

void add_u64(struct result *out, uint64_t value)
{
	add_u32(out, (uint32_t)value);
	add_u32(out, (uint32_t)(value >> 32));
}

void add_text(struct result *out, const char *text)
{
	size_t len = strlen(text);
	add_u32(out, (uint32_t)len);
	add_bytes(out, text, len);
}
