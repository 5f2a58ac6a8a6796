/*
 * The guest's resolver. No query ever leaves: the host says which names may be reached, and each of
 * these gets an address of our own that stands for it, for as long as the machine and its forks live.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
	MAX_LOOKUPS = 32, MAX_CLIENTS = 16, MAX_NAMES = 16384, CLIENT_MS = 10000,
	KIND_LOOKUP = 2, /* of OPEN */
};

/* 198.18.1.0. Not in the enum: a value beyond int makes all of its constants unsigned from gcc 13 on. */
static const uint32_t FIRST = 0xc6120100;

struct client { /* over TCP */
	bool used;
	int fd, slot;
	uint32_t serial;
	int64_t until;
	uint8_t in[2 + DNS_QUERY];
	size_t len;
};

struct lookup {
	bool used;
	struct stream *stream;
	struct question question;
	uint8_t query[DNS_QUERY];
	struct sockaddr_in peer;
	struct in_addr at;     /* the address that was asked, from which we answer */
	struct client *client; /* NULL: over UDP */
	uint32_t serial;
};

static int dns = -1, dns_slot = -1;
static bool enabled, paused;
static struct client clients[MAX_CLIENTS];
static struct lookup lookups[MAX_LOOKUPS];
static char **names;
static uint32_t name_count, last_serial;

static bool address_for(const char *name, uint32_t *address)
{
	uint32_t i = 0;
	while (i < name_count && strcmp(names[i], name) != 0)
		i++;
	if (i == MAX_NAMES)
		return false;
	if (i == name_count) {
		if (!names)
			names = must(calloc(MAX_NAMES, sizeof *names));
		names[name_count++] = must(strdup(name));
	}
	*address = htonl(FIRST + i);
	return true;
}

bool dns_name_of(uint32_t address, const char **name)
{
	uint32_t i = ntohl(address) - FIRST;
	if (i >= name_count)
		return false;
	*name = names[i];
	return true;
}

static void send_datagram(const struct lookup *l, const uint8_t *out, size_t len)
{
	struct iovec part = { (void *)out, len };
	union {
		struct cmsghdr header;
		uint8_t room[CMSG_SPACE(sizeof(struct in_pktinfo))];
	} control = { 0 };
	struct msghdr message = {
		.msg_name = (void *)&l->peer, .msg_namelen = sizeof l->peer, .msg_iov = &part,
		.msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control,
	};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	struct in_pktinfo from = { .ipi_spec_dst = l->at };
	header->cmsg_level = IPPROTO_IP;
	header->cmsg_type = IP_PKTINFO;
	header->cmsg_len = CMSG_LEN(sizeof from);
	memcpy(CMSG_DATA(header), &from, sizeof from);
	sendmsg(dns, &message, MSG_DONTWAIT);
}

static void answer(struct lookup *l, int code, const uint32_t *address)
{
	uint8_t out[2 + DNS_QUERY];
	size_t len = dns_answer(out + 2, l->query, &l->question, code, address);
	out[0] = (uint8_t)(len >> 8);
	out[1] = (uint8_t)len;
	if (!l->client)
		send_datagram(l, out + 2, len);
	else if (l->client->used && l->client->serial == l->serial)
		send(l->client->fd, out, len + 2, MSG_DONTWAIT | MSG_NOSIGNAL);
	l->used = false;
}

static void permitted(struct lookup *l)
{
	uint32_t address;
	if (l->question.type != DNS_A)
		answer(l, DNS_OK, NULL);
	else if (address_for(l->question.name, &address))
		answer(l, DNS_OK, &address);
	else
		answer(l, DNS_FAILED, NULL);
}

/* The host ends the stream: the name may be reached. */
static void on_input(void *owner)
{
	struct lookup *l = owner;
	stream_drain(l->stream, -1);
	if (!stream_at_end(l->stream))
		return;
	stream_own(l->stream, NULL, NULL);
	stream_close(l->stream);
	permitted(l);
}

/* The host aborts it: it may not. */
static void on_gone(void *owner)
{
	answer(owner, DNS_NO_NAME, NULL);
}

static const struct stream_owner calls = { on_input, on_gone };

/* What cannot be asked now is not answered: who asks will ask again. */
static void ask_host(struct lookup *l)
{
	struct result payload = { 0 };
	uint32_t id = tunnel_stream();
	l->stream = stream_open(id);
	if (!l->stream) {
		l->used = false;
		return;
	}
	stream_own(l->stream, &calls, l);
	add_u8(&payload, KIND_LOOKUP);
	add_text(&payload, l->question.name);
	add_u32(&payload, l->question.type);
	port_send(F_OPEN, 0, id, payload.data, payload.len);
	result_free(&payload);
}

/* The machine's own name, as programs look it up, and localhost: nobody's business outside. */
static bool is_own(const char *name)
{
	char own[DNS_NAME] = "";
	return strcmp(name, "localhost") == 0 ||
		(gethostname(own, sizeof own - 1) == 0 && strcasecmp(name, own) == 0);
}

static struct lookup *free_lookup(void)
{
	for (int i = 0; i < MAX_LOOKUPS; i++)
		if (!lookups[i].used)
			return &lookups[i];
	return NULL;
}

static void query(struct lookup *l, size_t len)
{
	const uint32_t loopback = htonl(INADDR_LOOPBACK);
	int code;
	l->used = true;
	if (!dns_parse(l->query, len, &l->question, &code)) {
		if (code >= 0)
			answer(l, code, NULL);
		l->used = false;
	} else if (is_own(l->question.name)) {
		answer(l, DNS_OK, l->question.type == DNS_A ? &loopback : NULL);
	} else if (!enabled) {
		answer(l, DNS_REFUSED, NULL);
	} else if (l->question.type == DNS_PTR || l->question.type == DNS_SRV) {
		answer(l, DNS_NO_NAME, NULL); /* of no address, of no service: nothing to decide */
	} else {
		ask_host(l);
	}
}

static void receive(void)
{
	union {
		struct cmsghdr header;
		uint8_t room[CMSG_SPACE(sizeof(struct in_pktinfo))];
	} control;
	struct lookup *l;
	while ((l = free_lookup())) {
		struct iovec part = { l->query, sizeof l->query };
		struct msghdr message = {
			.msg_name = &l->peer, .msg_namelen = sizeof l->peer, .msg_iov = &part,
			.msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control,
		};
		ssize_t n = recvmsg(dns, &message, MSG_DONTWAIT);
		if (n < 0)
			return;
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		if (!header || header->cmsg_type != IP_PKTINFO)
			continue;
		struct in_pktinfo info;
		memcpy(&info, CMSG_DATA(header), sizeof info);
		l->at = info.ipi_addr;
		l->client = NULL;
		query(l, (size_t)n);
	}
}

static void release(struct client *c)
{
	close(c->fd);
	c->used = false;
}

/* Takes the connection over; the oldest one makes room. */
void dns_connection(int fd)
{
	struct client *c = clients;
	for (int i = 0; i < MAX_CLIENTS && c->used; i++)
		if (!clients[i].used || clients[i].until < c->until)
			c = &clients[i];
	if (c->used)
		release(c);
	c->used = true;
	c->fd = fd;
	c->slot = -1;
	c->len = 0;
	c->serial = ++last_serial;
	c->until = now_ms() + CLIENT_MS;
}

static void read_client(struct client *c)
{
	ssize_t n = recv(c->fd, c->in + c->len, sizeof c->in - c->len, MSG_DONTWAIT);
	if (n <= 0) {
		if (n == 0 || (errno != EAGAIN && errno != EINTR))
			release(c);
		return;
	}
	c->len += (size_t)n;
	while (c->len >= 2) {
		size_t size = (size_t)c->in[0] << 8 | c->in[1];
		struct lookup *l = free_lookup();
		if (size > DNS_QUERY || !l) {
			release(c);
			return;
		}
		if (c->len < 2 + size)
			return;
		memcpy(l->query, c->in + 2, size);
		l->client = c;
		l->serial = c->serial;
		c->len -= 2 + size;
		memmove(c->in, c->in + 2 + size, c->len);
		query(l, size);
	}
}

void dns_open(int fd)
{
	dns = fd;
}

void dns_enable(bool value)
{
	enabled = value;
	if (!value)
		dns_reset();
}

/* Lookups under way are forgotten; nobody waits for an answer for ever. */
void dns_reset(void)
{
	for (struct lookup *l = lookups; l < lookups + MAX_LOOKUPS; l++)
		if (l->used) {
			stream_own(l->stream, NULL, NULL);
			stream_reset(l->stream, "the egress ended");
			l->used = false;
		}
}

void dns_pause(bool value)
{
	paused = value;
}

void dns_poll(void)
{
	dns_slot = dns >= 0 && !paused && free_lookup() ? watch(dns, POLLIN) : -1;
	for (struct client *c = clients; c < clients + MAX_CLIENTS; c++) {
		if (!c->used)
			continue;
		c->slot = paused ? -1 : watch(c->fd, POLLIN);
		if (!paused)
			wake_at(c->until);
	}
}

void dns_serve(void)
{
	if (ready(dns_slot))
		receive();
	for (struct client *c = clients; c < clients + MAX_CLIENTS; c++) {
		if (c->used && ready(c->slot))
			read_client(c);
		if (c->used && !paused && now_ms() >= c->until)
			release(c);
	}
}
