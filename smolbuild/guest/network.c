/* The guest's own network: loopback always, a device only in machines with a full network. */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <net/route.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

static void interface_up(int fd, const char *name)
{
	struct ifreq request = { 0 };
	snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
	if (ioctl(fd, SIOCGIFFLAGS, &request) < 0)
		return;
	request.ifr_flags |= IFF_UP;
	if (ioctl(fd, SIOCSIFFLAGS, &request) < 0)
		say("%s: %s", name, strerror(errno));
}

static void in_address(struct sockaddr *target, const char *address)
{
	struct sockaddr_in *in = (struct sockaddr_in *)target;
	in->sin_family = AF_INET;
	inet_pton(AF_INET, address, &in->sin_addr);
}

/* The addresses are those of QEMU's user networking. */
static void full_network(int fd)
{
	struct ifreq request = { .ifr_name = "eth0" };
	struct rtentry route = { .rt_flags = RTF_UP | RTF_GATEWAY };
	in_address(&request.ifr_addr, "10.0.2.15");
	if (ioctl(fd, SIOCSIFADDR, &request) < 0)
		return; /* no such device: a machine without network */
	in_address(&request.ifr_netmask, "255.255.255.0");
	ioctl(fd, SIOCSIFNETMASK, &request);
	interface_up(fd, "eth0");
	in_address(&route.rt_dst, "0.0.0.0");
	in_address(&route.rt_genmask, "0.0.0.0");
	in_address(&route.rt_gateway, "10.0.2.2");
	if (ioctl(fd, SIOCADDRT, &route) < 0)
		say("default route: %s", strerror(errno));
	/* Mounted over, so that the image keeps its own file. */
	if (access("/etc/resolv.conf", F_OK) < 0) {
		unlink("/etc/resolv.conf");
		write_file("/etc/resolv.conf", "", 0644);
	}
	if (!write_file("/run/smolbuild/resolv.conf", "nameserver 10.0.2.3\n", 0644) ||
	    mount("/run/smolbuild/resolv.conf", "/etc/resolv.conf", NULL, MS_BIND, NULL) < 0)
		say("/etc/resolv.conf: %s", strerror(errno));
}

void network(void)
{
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	interface_up(fd, "lo");
	full_network(fd);
	close(fd);
}

/* For one execution without network in a machine that has one: a namespace with nothing but lo. */
bool leave_network(void)
{
	if (unshare(CLONE_NEWNET) < 0) {
		dprintf(2, "smolbuild: cannot take the network away: %s\n", strerror(errno));
		return false;
	}
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd >= 0) {
		interface_up(fd, "lo");
		close(fd);
	}
	return true;
}
