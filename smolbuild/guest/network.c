/* The guest's own network: loopback always, a device only in machines with a full network. */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/route.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static bool interface_up(int fd, const char *name)
{
	struct ifreq request = { 0 };
	snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
	if (ioctl(fd, SIOCGIFFLAGS, &request) < 0)
		return false;
	request.ifr_flags |= IFF_UP;
	return ioctl(fd, SIOCSIFFLAGS, &request) == 0;
}

static void in_address(struct sockaddr *target, const char *address)
{
	struct sockaddr_in *in = (struct sockaddr_in *)target;
	in->sin_family = AF_INET;
	inet_pton(AF_INET, address, &in->sin_addr);
}

static bool set_address(int fd, const char *name, const char *address, const char *mask)
{
	struct ifreq request = { 0 };
	snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
	in_address(&request.ifr_addr, address);
	if (ioctl(fd, SIOCSIFADDR, &request) < 0)
		return false;
	in_address(&request.ifr_netmask, mask);
	return ioctl(fd, SIOCSIFNETMASK, &request) == 0;
}

/* Up, with this address if one is given, in the namespace of the caller. */
bool interface_at(const char *name, const char *address, const char *mask)
{
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool done = fd >= 0 && (!address || set_address(fd, name, address, mask)) &&
		interface_up(fd, name);
	int saved = errno;
	close(fd);
	errno = saved;
	return done;
}

bool default_route(const char *gateway)
{
	struct rtentry route = { .rt_flags = RTF_UP | RTF_GATEWAY };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	in_address(&route.rt_dst, "0.0.0.0");
	in_address(&route.rt_genmask, "0.0.0.0");
	in_address(&route.rt_gateway, gateway);
	bool done = fd >= 0 && ioctl(fd, SIOCADDRT, &route) == 0;
	int saved = errno;
	close(fd);
	errno = saved;
	return done;
}

/* A link that leads nowhere stays as it is: what it leads to is made, in memory where that is. */
static bool something_at(const char *path)
{
	char target[4096] = "/etc/";
	if (access(path, F_OK) == 0)
		return true;
	ssize_t n = readlink(path, target + 5, sizeof target - 6);
	char *place = target[5] == '/' ? target + 5 : target;
	for (char *slash = place; n > 0 && (slash = strchr(slash + 1, '/'));) {
		*slash = 0;
		mkdir(place, 0755);
		*slash = '/';
	}
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
	close(fd);
	return fd >= 0;
}

/* Mounted over, so that the image keeps its own file, and what steps write here is not in it. */
void resolver(const char *address)
{
	char line[64];
	snprintf(line, sizeof line, "nameserver %s\n", address);
	if (!something_at("/etc/resolv.conf") ||
	    !write_file("/run/smolbuild/resolv.conf", line, 0644) ||
	    mount("/run/smolbuild/resolv.conf", "/etc/resolv.conf", NULL, MS_BIND, NULL) < 0)
		say("/etc/resolv.conf: %s", strerror(errno));
}

void network(void)
{
	if (!interface_at("lo", NULL, NULL))
		say("lo: %s", strerror(errno));
	/* The addresses are those of QEMU's user networking. */
	if (!interface_at("eth0", "10.0.2.15", "255.255.255.0"))
		return; /* no such device: a machine without network */
	if (!default_route("10.0.2.2"))
		say("default route: %s", strerror(errno));
	resolver("10.0.2.3");
}

/* For one execution without network in a machine that has one: a namespace with nothing but lo. */
bool leave_network(void)
{
	if (unshare(CLONE_NEWNET) < 0) {
		dprintf(2, "smolbuild: cannot take the network away: %s\n", strerror(errno));
		return false;
	}
	interface_at("lo", NULL, NULL);
	return true;
}
