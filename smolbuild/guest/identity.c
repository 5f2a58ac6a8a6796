/*
 * The files that tell machines apart. Each is a file in memory, mounted over its place before a
 * checkpoint and mapped: a fork then renews it with a few stores, where a write to the disk costs a
 * cold, emulated kernel tens of milliseconds. The image's own files stay as they were.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE = 130, PAGE = 4096 };

static struct place {
	const char *source, *target;
	bool optional; /* only where the image has it, as a file of its own */
	int fd;
	char *page;
} places[] = {
	[ID_HOSTNAME] = { "/run/smolbuild/hostname", "/etc/hostname", false, -1, NULL },
	[ID_MACHINE] = { "/run/smolbuild/machine-id", "/etc/machine-id", false, -1, NULL },
	[ID_BOOT] = { "/run/smolbuild/boot_id", "/proc/sys/kernel/random/boot_id", false, -1,
		     NULL },
	[ID_DBUS] = { "/run/smolbuild/dbus-machine-id", "/var/lib/dbus/machine-id", true, -1, NULL },
};

void read_line(const char *path, char *line, size_t size)
{
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, line, size - 1);
	line[n > 0 ? n : 0] = 0;
	line[strcspn(line, "\n")] = 0;
	if (fd >= 0)
		close(fd);
}

static bool wanted(const struct place *p)
{
	struct stat st;
	return !p->optional || (lstat(p->target, &st) == 0 && S_ISREG(st.st_mode));
}

static bool prepare(struct place *p, bool may_create)
{
	char line[LINE];
	if (access(p->target, F_OK) < 0) {
		if (!may_create) /* the file system may be frozen: creating would never return */
			return false;
		if (!write_file(p->target, "", 0644))
			return false;
	}
	read_line(p->target, line, sizeof line - 1);
	strcat(line, "\n");
	if (!write_file(p->source, line, p == &places[ID_HOSTNAME] ? 0644 : 0444))
		return false;
	if (mount(p->source, p->target, NULL, MS_BIND, NULL) < 0)
		return false;
	int fd = open(p->source, O_RDWR | O_CLOEXEC);
	void *page = fd < 0 ? MAP_FAILED :
		mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
	if (page == MAP_FAILED) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	p->fd = fd;
	p->page = page;
	memcpy(p->page, line, strlen(line)); /* so that the page is mapped for writing already */
	return true;
}

/* Idempotent. Changes no content: whoever reads a file sees what was there. */
bool identity_prepare(bool may_create)
{
	bool done = true;
	for (struct place *p = places; p < places + sizeof places / sizeof *places; p++)
		if (p->fd < 0 && wanted(p))
			done = prepare(p, may_create) && done;
	return done;
}

bool identity_prepared(void)
{
	return places[ID_HOSTNAME].fd >= 0 && places[ID_MACHINE].fd >= 0 && places[ID_BOOT].fd >= 0;
}

static bool put(struct place *p, const char *line, size_t len)
{
	/* A program may have cut the file; a store beyond its end would be the end of process 1. */
	struct stat st;
	if (fstat(p->fd, &st) < 0 || ((size_t)st.st_size != len && ftruncate(p->fd, (off_t)len) < 0))
		return false;
	memcpy(p->page, line, len);
	return true;
}

bool identity_set(enum identity which, const char *value)
{
	char line[LINE];
	int len = snprintf(line, sizeof line, "%s\n", value);
	if (len >= (int)sizeof line) {
		errno = ENAMETOOLONG;
		return false;
	}
	if (which == ID_MACHINE && places[ID_DBUS].fd >= 0 &&
	    !put(&places[ID_DBUS], line, (size_t)len))
		return false;
	return put(&places[which], line, (size_t)len);
}

bool new_uuid(char text[UUID_SIZE])
{
	static const char hex[] = "0123456789abcdef";
	uint8_t b[16];
	if (getrandom(b, sizeof b, GRND_NONBLOCK) != sizeof b)
		return false;
	b[6] = (b[6] & 15) | 64; /* RFC 9562: version 4, variant 10 */
	b[8] = (b[8] & 63) | 128;
	for (int i = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			*text++ = '-';
		*text++ = hex[b[i] >> 4];
		*text++ = hex[b[i] & 15];
	}
	*text = 0;
	return true;
}
