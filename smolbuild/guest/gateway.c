/*
 * The way out of a guest that has no device: a second network namespace in which every address is
 * local, so that a listener there takes each connection whatever its destination and port. It is
 * joined to the guest's own namespace by a veth pair, and to nothing else.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INSIDE "egress"  /* the guest's end of the pair */
#define OUTSIDE "guest"  /* ours */
#define NAMESPACE "/proc/self/ns/net"
#define NO_PING "/proc/sys/net/ipv4/icmp_echo_ignore_all"
#define NO_IPV6 "/proc/sys/net/ipv6/conf/%s/disable_ipv6"

/* linux/netlink.h, linux/rtnetlink.h, linux/if_link.h and linux/veth.h, which musl does not bring */
enum {
	NLM_REQUEST = 1, NLM_ACK = 4, NLM_EXCL = 0x200, NLM_CREATE = 0x400, NLM_ERROR = 2,
	NEWLINK = 16, NEWROUTE = 24,
	ATTR_IFNAME = 3, ATTR_LINKINFO = 18, ATTR_NET_NS_FD = 28, INFO_KIND = 1, INFO_DATA = 2,
	VETH_PEER = 1, ATTR_DST = 1, ATTR_OIF = 4,
	TABLE_LOCAL = 255, PROTOCOL_BOOT = 3, SCOPE_LINK = 253, SCOPE_HOST = 254,
	TYPE_UNICAST = 1, TYPE_LOCAL = 2,
};
struct header { uint32_t len; uint16_t type, flags; uint32_t sequence, port; };
struct attribute { uint16_t len, type; };
struct link { uint8_t family, pad; uint16_t type; int32_t index; uint32_t flags, change; };
struct route {
	uint8_t family, dst_len, src_len, tos, table, protocol, scope, type;
	uint32_t flags;
};
struct message {
	union {
		struct header header;
		uint8_t bytes[512];
	};
	size_t len;
};

static void put(struct message *m, const void *data, size_t len)
{
	memcpy(m->bytes + m->len, data, len);
	m->len += (len + 3) & ~(size_t)3;
}

static struct message begin(uint16_t type, uint16_t flags, const void *body, size_t len)
{
	struct message m = { 0 };
	m.header = (struct header){ .type = type, .flags = NLM_REQUEST | NLM_ACK | flags };
	m.len = sizeof m.header;
	put(&m, body, len);
	return m;
}

static size_t nest(struct message *m, uint16_t type)
{
	size_t at = m->len;
	put(m, &(struct attribute){ 0, type }, sizeof(struct attribute));
	return at;
}

static void end(struct message *m, size_t at)
{
	uint16_t len = (uint16_t)(m->len - at);
	memcpy(m->bytes + at, &len, sizeof len);
}

static void attribute(struct message *m, uint16_t type, const void *data, size_t len)
{
	struct attribute a = { (uint16_t)(sizeof a + len), type };
	put(m, &a, sizeof a);
	put(m, data, len);
}

static bool ask(struct message *m)
{
	struct {
		struct header header;
		int32_t error;
		uint8_t rest[1024];
	} answer = { 0 };
	struct sockaddr to = { .sa_family = AF_NETLINK };
	m->header.len = (uint32_t)m->len;
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return false;
	/* struct sockaddr_nl is 12 bytes: family, and zeros for the kernel itself */
	bool done = sendto(fd, m->bytes, m->len, 0, &to, 12) == (ssize_t)m->len &&
		recv(fd, &answer, sizeof answer, 0) >= (ssize_t)(sizeof(struct header) + 4) &&
		answer.header.type == NLM_ERROR;
	int saved = done ? -answer.error : errno;
	close(fd);
	errno = saved;
	return done && !saved;
}

static bool add_pair(int other)
{
	struct link link = { 0 };
	struct message m = begin(NEWLINK, NLM_CREATE | NLM_EXCL, &link, sizeof link);
	attribute(&m, ATTR_IFNAME, INSIDE, sizeof INSIDE);
	size_t info = nest(&m, ATTR_LINKINFO);
	attribute(&m, INFO_KIND, "veth", 4);
	size_t data = nest(&m, INFO_DATA), peer = nest(&m, VETH_PEER);
	put(&m, &link, sizeof link);
	attribute(&m, ATTR_IFNAME, OUTSIDE, sizeof OUTSIDE);
	attribute(&m, ATTR_NET_NS_FD, &other, sizeof other);
	end(&m, peer);
	end(&m, data);
	end(&m, info);
	return ask(&m);
}

/* Into the table of local addresses: what we answer from must be ours by that one. */
static bool add_local(uint8_t type, uint8_t scope, uint8_t bits, const char *to, const char *device)
{
	struct route route = {
		.family = AF_INET, .dst_len = bits, .table = TABLE_LOCAL,
		.protocol = PROTOCOL_BOOT, .scope = scope, .type = type,
	};
	struct in_addr address;
	uint32_t index = if_nametoindex(device);
	struct message m = begin(NEWROUTE, NLM_CREATE | NLM_EXCL, &route, sizeof route);
	inet_pton(AF_INET, to, &address);
	attribute(&m, ATTR_DST, &address, sizeof address);
	attribute(&m, ATTR_OIF, &index, sizeof index);
	return ask(&m);
}

/* IPv6 leads nowhere, not even to us. */
static void without_ipv6(const char *device)
{
	char path[80];
	snprintf(path, sizeof path, NO_IPV6, device);
	write_file(path, "1", 0);
}

static int listen_at(uint16_t port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd >= 0 && bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 128) == 0)
		return fd;
	int saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

static int dns_socket(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(53) };
	int one = 1, fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd >= 0 && setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &one, sizeof one) == 0 &&
	    bind(fd, (struct sockaddr *)&at, sizeof at) == 0)
		return fd;
	int saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

/* linux/bpf.h: a program for socket lookup (Linux 5.9) gives every connection to one listener. */
enum {
	BPF_MAP_CREATE = 0, BPF_MAP_UPDATE = 2, BPF_PROG_LOAD = 5, BPF_LINK_CREATE = 28,
	MAP_SOCKETS = 15, PROGRAM_SK_LOOKUP = 30, ATTACH_SK_LOOKUP = 36,
	CALL_MAP_LOOKUP = 1, CALL_SK_RELEASE = 86, CALL_SK_ASSIGN = 124,
};
struct instruction { uint8_t code, registers; int16_t offset; int32_t value; };
#define R(to, from) ((uint8_t)((from) << 4 | (to)))

static int bpf(int command, void *attributes, size_t size)
{
	return (int)syscall(SYS_bpf, command, attributes, size);
}

static int load_program(int map)
{
	const struct instruction program[] = {
		{ 0xbf, R(6, 1), 0, 0 },              /* r6 = context */
		{ 0x61, R(2, 6), 12, 0 },             /* r2 = its protocol */
		{ 0x55, R(2, 0), 14, IPPROTO_TCP },   /* another one: as it would be found */
		{ 0x62, R(10, 0), -4, 0 },            /* key 0 on the stack */
		{ 0x18, R(1, 1), 0, map }, { 0 },     /* r1 = map */
		{ 0xbf, R(2, 10), 0, 0 },
		{ 0x07, R(2, 0), 0, -4 },             /* r2 = &key */
		{ 0x85, 0, 0, CALL_MAP_LOOKUP },
		{ 0x15, R(0, 0), 7, 0 },              /* no listener: as it would be found */
		{ 0xbf, R(7, 0), 0, 0 },
		{ 0xbf, R(1, 6), 0, 0 },
		{ 0xbf, R(2, 7), 0, 0 },
		{ 0xb7, R(3, 0), 0, 0 },
		{ 0x85, 0, 0, CALL_SK_ASSIGN },
		{ 0xbf, R(1, 7), 0, 0 },
		{ 0x85, 0, 0, CALL_SK_RELEASE },
		{ 0xb7, R(0, 0), 0, 1 },              /* pass */
		{ 0x95, 0, 0, 0 },
	};
	struct {
		uint32_t type, count;
		uint64_t program, license;
		uint32_t log_level, log_size;
		uint64_t log;
		uint32_t kernel_version, flags;
		char name[16];
		uint32_t device, attach_type;
	} load = {
		.type = PROGRAM_SK_LOOKUP, .count = sizeof program / sizeof *program,
		.program = (uintptr_t)program, .license = (uintptr_t) "Apache-2.0",
		.attach_type = ATTACH_SK_LOOKUP,
	};
	return bpf(BPF_PROG_LOAD, &load, sizeof load);
}

/* What is left open here, the map's listener and the link, holds for as long as the agent lives. */
static bool steer(int listener)
{
	struct { uint32_t type, key_size, value_size, entries, flags; } create = {
		MAP_SOCKETS, 4, 8, 1, 0
	};
	uint32_t key = 0;
	uint64_t value = (uint64_t)listener;
	int map = bpf(BPF_MAP_CREATE, &create, sizeof create);
	struct { uint32_t map, pad; uint64_t key, value, flags; } update = {
		(uint32_t)map, 0, (uintptr_t)&key, (uintptr_t)&value, 0
	};
	if (map < 0 || bpf(BPF_MAP_UPDATE, &update, sizeof update) < 0)
		return false;
	int program = load_program(map);
	int here = open(NAMESPACE, O_RDONLY | O_CLOEXEC);
	struct { uint32_t program, target, attach_type, flags; } link = {
		(uint32_t)program, (uint32_t)here, ATTACH_SK_LOOKUP, 0
	};
	bool done = program >= 0 && here >= 0 && bpf(BPF_LINK_CREATE, &link, sizeof link) >= 0;
	int saved = errno;
	close(program);
	close(map);
	close(here);
	errno = saved;
	return done;
}

/* In our namespace, once the pair is there. */
static bool open_sockets(struct gateway *gateway)
{
	const uint16_t ports[GATEWAY_PORTS] = { 53, 80, 443 };
	without_ipv6("all");
	write_file(NO_PING, "1", 0); /* that what is not there answers would mislead */
	if (!interface_at(OUTSIDE, GATEWAY, "255.255.255.252") ||
	    !add_local(TYPE_UNICAST, SCOPE_LINK, 32, GATEWAY_GUEST, OUTSIDE) ||
	    !add_local(TYPE_LOCAL, SCOPE_HOST, 0, "0.0.0.0", "lo") ||
	    (gateway->dns = dns_socket()) < 0 ||
	    (gateway->listeners[gateway->count++] = listen_at(ports[0])) < 0)
		return false;
	gateway->all_ports = steer(gateway->listeners[0]);
	while (!gateway->all_ports && gateway->count < GATEWAY_PORTS) {
		int fd = listen_at(ports[gateway->count]);
		if (fd < 0)
			return false;
		gateway->listeners[gateway->count++] = fd;
	}
	return true;
}

static bool join(struct gateway *gateway, int home, int ours)
{
	if (setns(home, CLONE_NEWNET) < 0 || !add_pair(ours))
		return false;
	without_ipv6(INSIDE);
	if (setns(ours, CLONE_NEWNET) < 0)
		return false;
	bool open = open_sockets(gateway);
	int saved = errno;
	if (setns(home, CLONE_NEWNET) < 0)
		return false;
	errno = saved;
	return open && interface_at(INSIDE, GATEWAY_GUEST, "255.255.255.252") &&
		default_route(GATEWAY);
}

/* The namespace lives by its sockets: no name leads to it, no descriptor of it is kept. */
bool gateway_open(struct gateway *gateway)
{
	*gateway = (struct gateway){ .dns = -1 };
	int home = open(NAMESPACE, O_RDONLY | O_CLOEXEC), ours = -1;
	bool done = false;
	if (home >= 0 && unshare(CLONE_NEWNET) == 0) {
		interface_at("lo", NULL, NULL);
		ours = open(NAMESPACE, O_RDONLY | O_CLOEXEC);
		done = ours >= 0 && join(gateway, home, ours);
	}
	int saved = errno;
	if (home >= 0 && setns(home, CLONE_NEWNET) < 0)
		say("cannot come back from the egress namespace: %s", strerror(errno));
	if (!done) {
		for (int i = 0; i < gateway->count; i++)
			close(gateway->listeners[i]);
		close(gateway->dns);
		*gateway = (struct gateway){ .dns = -1 };
	}
	close(home);
	close(ours);
	errno = saved;
	return done;
}
