/*
 * Egress: connections become streams to the host, which decides. Those to the loopback port are for
 * its HTTP proxy; those that the gateway took say where they were going.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_TUNNELS = 128, KIND_CONNECTION = 1 };

struct tunnel {
	bool used, read_done, write_done;
	struct stream *stream;
	int fd, slot;
};

static struct tunnel tunnels[MAX_TUNNELS];
static int listener = -1, listener_slot = -1;
static bool paused;
static uint32_t last_id = 1;
static struct gateway gateway;
static int gateway_slots[GATEWAY_PORTS];

/* An abort, not an orderly end: the program in the guest must not take it for one. */
static void refuse(int fd)
{
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 0 }, sizeof(struct linger));
	close(fd);
}

static void release(struct tunnel *t)
{
	close(t->fd);
	*t = (struct tunnel){ 0 };
}

static void flush(struct tunnel *t)
{
	if (stream_drain(t->stream, t->write_done ? -1 : t->fd) < 0) {
		t->write_done = true; /* the peer reads no more */
		stream_drain(t->stream, -1);
	}
	if (stream_at_end(t->stream) && !t->write_done) {
		shutdown(t->fd, SHUT_WR);
		t->write_done = true;
	}
}

static void settle(struct tunnel *t)
{
	if (!t->read_done || !stream_at_end(t->stream))
		return;
	stream_own(t->stream, NULL, NULL);
	stream_close(t->stream);
	release(t);
}

static void on_input(void *owner)
{
	struct tunnel *t = owner;
	flush(t);
	settle(t); /* nothing else may happen that would wake the loop for it */
}

static void on_gone(void *owner)
{
	struct tunnel *t = owner;
	refuse(t->fd);
	*t = (struct tunnel){ 0 };
}

static const struct stream_owner calls = { on_input, on_gone };

static struct tunnel *free_tunnel(void)
{
	for (int i = 0; i < MAX_TUNNELS; i++)
		if (!tunnels[i].used)
			return &tunnels[i];
	return NULL;
}

uint32_t tunnel_stream(void)
{
	return last_id += 2;
}

static void open_tunnel(int fd, const struct result *payload)
{
	struct tunnel *t = free_tunnel();
	uint32_t id = tunnel_stream();
	struct stream *s = t ? stream_open(id) : NULL;
	if (!s) {
		refuse(fd);
		return;
	}
	*t = (struct tunnel){ .used = true, .stream = s, .fd = fd, .slot = -1 };
	stream_own(s, &calls, t);
	port_send(F_OPEN, 0, id, payload->data, payload->len);
}

static void accept_proxy(void)
{
	int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (fd >= 0)
		open_tunnel(fd, &(struct result){ 0 });
}

/* The address of the connection's near end is where the program in the guest wanted to go. */
static void accept_any(int from)
{
	struct sockaddr_in to;
	socklen_t len = sizeof to;
	struct result payload = { 0 };
	char address[INET_ADDRSTRLEN];
	const char *host = address;
	int fd = accept4(from, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
	if (fd < 0)
		return;
	if (getsockname(fd, (struct sockaddr *)&to, &len) < 0) {
		refuse(fd);
	} else if (ntohs(to.sin_port) == 53) {
		dns_connection(fd);
	} else if (listener < 0) { /* closed for now */
		refuse(fd);
	} else {
		inet_ntop(AF_INET, &to.sin_addr, address, sizeof address);
		dns_name_of(to.sin_addr.s_addr, &host);
		add_u8(&payload, KIND_CONNECTION);
		add_text(&payload, host);
		add_u32(&payload, ntohs(to.sin_port));
		open_tunnel(fd, &payload);
		result_free(&payload);
	}
}

static void receive(struct tunnel *t)
{
	static uint8_t buffer[MAX_DATA];
	size_t size = port_congested() ? 0 : stream_credit(t->stream);
	if (t->read_done || !size)
		return;
	ssize_t n = recv(t->fd, buffer, size < MAX_DATA ? size : MAX_DATA, 0);
	if (n > 0) {
		stream_data(t->stream, 0, buffer, (size_t)n);
		explicit_bzero(buffer, (size_t)n);
	} else if (n == 0) {
		t->read_done = true;
		stream_eof(t->stream);
	} else if (errno != EAGAIN && errno != EINTR) {
		stream_reset(t->stream, strerror(errno));
	}
}

static bool listen_on(uint32_t port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	int one = 1;
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (listener >= 0) {
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		if (bind(listener, (struct sockaddr *)&at, sizeof at) == 0 &&
		    listen(listener, 128) == 0)
			return true;
		int saved = errno;
		close(listener);
		errno = saved;
	}
	listener = -1;
	return false;
}

/* Once for the life of the machine; closed, it refuses. Says what keeps it from being there. */
static const char *open_gateway(void)
{
	static bool tried;
	static const char *missing = "the agent of a guest only";
	if (tried || !is_guest)
		return missing;
	tried = true;
	missing = NULL;
	if (!gateway_open(&gateway)) {
		missing = errno == EOPNOTSUPP ? "the kernel has no veth" : strerror(errno);
		return missing;
	}
	dns_open(gateway.dns);
	resolver(GATEWAY);
	if (!gateway.all_ports)
		missing = "the kernel steers no sockets: ports 80 and 443 only";
	return missing;
}

static void answer(struct stream *s, const char *missing)
{
	struct result out = { 0 };
	add_text(&out, missing ? missing : "");
	stream_result(s, C_OK, NULL, &out);
	result_free(&out);
}

/* Port 0 ends it; the same port again changes nothing. */
void tunnels_request(struct stream *s, struct reader *in)
{
	static uint32_t current;
	uint32_t port = read_u32(in);
	if (in->bad || port > 65535) {
		stream_result(s, C_BAD_REQUEST, "malformed tunnel request", NULL);
		return;
	}
	const char *missing = port ? open_gateway() : NULL;
	dns_enable(port != 0);
	if (port != current && listener >= 0) {
		close(listener);
		listener = -1;
		tunnels_reset();
	}
	if (port && listener < 0 && !listen_on(port)) {
		current = 0;
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
		return;
	}
	current = port;
	answer(s, missing);
}

void tunnels_reset(void)
{
	for (int i = 0; i < MAX_TUNNELS; i++)
		if (tunnels[i].used)
			stream_reset(tunnels[i].stream, "the egress ended");
	dns_reset();
}

void tunnels_pause(bool value)
{
	paused = value;
	dns_pause(value);
}

void tunnels_poll(void)
{
	/*
	 * A paused listener keeps its queue: who connects meanwhile is served after the restore.
	 * So does one without a free tunnel: watching what cannot be accepted would spin.
	 */
	bool open = !paused && free_tunnel();
	listener_slot = open && listener >= 0 ? watch(listener, POLLIN) : -1;
	for (int i = 0; i < gateway.count; i++)
		gateway_slots[i] = open ? watch(gateway.listeners[i], POLLIN) : -1;
	dns_poll();
	for (struct tunnel *t = tunnels; t < tunnels + MAX_TUNNELS; t++) {
		if (!t->used)
			continue;
		short events = 0;
		if (!t->read_done && stream_credit(t->stream) && !port_congested())
			events |= POLLIN;
		if (stream_has_input(t->stream))
			events |= POLLOUT;
		t->slot = events ? watch(t->fd, events) : -1;
	}
}

void tunnels_serve(void)
{
	if (ready(listener_slot))
		accept_proxy();
	for (int i = 0; i < gateway.count; i++)
		if (ready(gateway_slots[i]))
			accept_any(gateway.listeners[i]);
	dns_serve();
	for (struct tunnel *t = tunnels; t < tunnels + MAX_TUNNELS; t++) {
		if (t->used && ready(t->slot) & POLLOUT)
			flush(t);
		if (t->used && ready(t->slot) & (POLLIN | POLLHUP | POLLERR))
			receive(t);
		if (t->used)
			settle(t);
	}
}
