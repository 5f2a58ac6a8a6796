/* What a guest's root can try besides ordinary programs: escape HOW ADDRESS PORT. */
#include <arpa/inet.h>
#include <errno.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/ip.h>
#include <netpacket/packet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static const char TEXT[] = "escaped";

static int datagram(uint8_t *out, const char *from, const char *to, int port)
{
	struct iphdr ip = { .version = 4, .ihl = 5, .ttl = 64, .protocol = IPPROTO_UDP };
	uint16_t udp[4] = { htons(4000), htons((uint16_t)port), htons(8 + sizeof TEXT), 0 };
	int len = (int)(sizeof ip + sizeof udp + sizeof TEXT);
	uint32_t sum = 0;
	uint16_t words[10];
	ip.tot_len = htons((uint16_t)len);
	inet_pton(AF_INET, from, &ip.saddr);
	inet_pton(AF_INET, to, &ip.daddr);
	memcpy(words, &ip, sizeof words);
	for (int i = 0; i < 10; i++)
		sum += words[i];
	sum = (sum & 0xffff) + (sum >> 16);
	ip.check = (uint16_t)~(sum + (sum >> 16));
	memcpy(out, &ip, sizeof ip);
	memcpy(out + sizeof ip, udp, sizeof udp);
	memcpy(out + sizeof ip + sizeof udp, TEXT, sizeof TEXT);
	return len;
}

static int raw(const char *from, const char *to, int port)
{
	uint8_t out[128];
	struct sockaddr_in at = { .sin_family = AF_INET };
	int fd = socket(AF_INET, SOCK_RAW, IPPROTO_RAW);
	int len = datagram(out, from, to, port);
	inet_pton(AF_INET, to, &at.sin_addr);
	return sendto(fd, out, (size_t)len, 0, (struct sockaddr *)&at, sizeof at) == len ? 0 : errno;
}

static int packets(const char *from, const char *to, int port)
{
	uint8_t out[256] = { 255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 0 };
	int len = 14 + datagram(out + 14, from, to, port), sent = 0;
	int fd = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
	for (struct if_nameindex *i = if_nameindex(); i && i->if_index; i++) {
		struct sockaddr_ll at = { .sll_family = AF_PACKET, .sll_halen = 6 };
		at.sll_ifindex = (int)i->if_index;
		memset(at.sll_addr, 255, 6);
		sent += sendto(fd, out, (size_t)len, 0, (struct sockaddr *)&at, sizeof at) == len;
	}
	return sent ? 0 : ENETDOWN;
}

static int plain(int family, int type, const char *to, int port)
{
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port) };
	int fd = socket(family, type, 0);
	struct timeval limit = { 3, 0 };
	char answer[64];
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
	inet_pton(AF_INET, to, &in.sin_addr);
	inet_pton(AF_INET6, to, &in6.sin6_addr);
	struct sockaddr *at = family == AF_INET ? (struct sockaddr *)&in : (struct sockaddr *)&in6;
	if (connect(fd, at, family == AF_INET ? sizeof in : sizeof in6) < 0 ||
	    send(fd, TEXT, sizeof TEXT, MSG_NOSIGNAL) < 0)
		return errno;
	if (type == SOCK_STREAM)
		return recv(fd, answer, sizeof answer, 0) > 0 ? 0 : ECONNRESET;
	return 0;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	const char *how = argv[1], *to = argv[2];
	int port = atoi(argv[3]), error;
	if (!strcmp(how, "tcp"))
		error = plain(AF_INET, SOCK_STREAM, to, port);
	else if (!strcmp(how, "udp"))
		error = plain(AF_INET, SOCK_DGRAM, to, port);
	else if (!strcmp(how, "tcp6"))
		error = plain(AF_INET6, SOCK_STREAM, to, port);
	else if (!strcmp(how, "udp6"))
		error = plain(AF_INET6, SOCK_DGRAM, to, port);
	else if (!strcmp(how, "raw"))
		error = raw("198.18.0.2", to, port);
	else if (!strcmp(how, "spoofed"))
		error = raw("10.0.2.15", to, port);
	else
		error = packets("198.18.0.2", to, port);
	printf("%s %s %d: %s\n", how, to, port, strerror(error));
	return error != 0;
}
