/* Unpacks a tar stream from stdin below a directory: ustar, PAX and GNU names. Runs in a child. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { BLOCK = 512, NAME_LIMIT = 4096, EXTRA_LIMIT = 1 << 20 };

struct member {
	char name[NAME_LIMIT], link[NAME_LIMIT];
	uint64_t size, uid, gid, mtime, major, minor;
	mode_t mode;
	char type;
};
struct overrides {
	char *name, *link;
	int64_t size, uid, gid, mtime; /* -1: none */
};

static bool fail(const char *what, const char *why)
{
	dprintf(2, "%.3000s: %s\n", what, why);
	return false;
}

static bool read_fully(void *data, size_t len)
{
	uint8_t *at = data;
	while (len) {
		ssize_t n = read(0, at, len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return fail("archive", "ends early");
		at += n;
		len -= (size_t)n;
	}
	return true;
}

static bool number(const char *field, size_t len, uint64_t *value)
{
	*value = 0;
	if (field[0] & 0x80) { /* base 256, GNU */
		if ((uint8_t)field[0] != 0x80)
			return false;
		for (size_t i = 1; i < len; i++) {
			if (*value >> 55)
				return false;
			*value = *value << 8 | (uint8_t)field[i];
		}
		return true;
	}
	size_t i = 0;
	while (i < len && field[i] == ' ')
		i++;
	for (; i < len && field[i] && field[i] != ' '; i++) {
		if (field[i] < '0' || field[i] > '7' || *value >> 60)
			return false;
		*value = *value << 3 | (uint64_t)(field[i] - '0');
	}
	return true;
}

static bool checksum_holds(const char *h)
{
	uint64_t expected, sum = 0;
	for (int i = 0; i < BLOCK; i++)
		sum += i >= 148 && i < 156 ? ' ' : (uint8_t)h[i];
	return number(h + 148, 8, &expected) && sum == expected;
}

/* Relative, without "..": the archive stays below its target. An empty result is the target itself. */
static bool clean(const char *name, char *to)
{
	size_t len = 0;
	while (*name) {
		size_t part = strcspn(name, "/");
		if (part == 2 && name[0] == '.' && name[1] == '.')
			return fail(name, "leads out of the target");
		if (part && !(part == 1 && name[0] == '.')) {
			if (len + part + 2 > NAME_LIMIT)
				return fail("a name", "is too long");
			if (len)
				to[len++] = '/';
			memcpy(to + len, name, part);
			len += part;
		}
		name += part;
		name += *name == '/';
	}
	to[len] = 0;
	return true;
}

static bool header(const char *h, const struct overrides *o, struct member *m)
{
	char name[256 + 2], link[101];
	uint64_t mode;
	snprintf(name, sizeof name, "%.100s", h);
	if (memcmp(h + 257, "ustar\0", 6) == 0 && h[345])
		snprintf(name, sizeof name, "%.155s/%.100s", h + 345, h);
	snprintf(link, sizeof link, "%.100s", h + 157);
	if (!checksum_holds(h) || !number(h + 100, 8, &mode) || !number(h + 108, 8, &m->uid) ||
	    !number(h + 116, 8, &m->gid) || !number(h + 124, 12, &m->size) ||
	    !number(h + 136, 12, &m->mtime))
		return fail("archive", "has a damaged header");
	m->type = h[156];
	m->mode = mode & 07777;
	m->major = m->minor = 0;
	if (m->type == '3' || m->type == '4')
		if (!number(h + 329, 8, &m->major) || !number(h + 337, 8, &m->minor))
			return fail("archive", "has a damaged device number");
	if (o->size >= 0)
		m->size = (uint64_t)o->size;
	if (o->uid >= 0)
		m->uid = (uint64_t)o->uid;
	if (o->gid >= 0)
		m->gid = (uint64_t)o->gid;
	if (o->mtime >= 0)
		m->mtime = (uint64_t)o->mtime;
	if (m->uid > UINT32_MAX - 1 || m->gid > UINT32_MAX - 1 || m->size > INT64_MAX - BLOCK)
		return fail("archive", "has a number out of range");
	const char *target = o->link ? o->link : link;
	if (strlen(target) >= NAME_LIMIT)
		return fail("a link", "is too long");
	strcpy(m->link, target);
	return clean(o->name ? o->name : name, m->name);
}

static bool make_parents(char *name)
{
	for (char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		bool made = mkdir(name, 0755) == 0 || errno == EEXIST;
		*slash = '/';
		if (!made)
			return fail(name, strerror(errno));
	}
	return true;
}

static uint64_t padding(uint64_t size)
{
	return -size & (BLOCK - 1);
}

static bool skip(uint64_t size)
{
	char buffer[8192];
	while (size) {
		size_t part = size < sizeof buffer ? (size_t)size : sizeof buffer;
		if (!read_fully(buffer, part))
			return false;
		size -= part;
	}
	return true;
}

static bool write_regular(const struct member *m)
{
	static char buffer[65536];
	int fd = open(m->name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return fail(m->name, strerror(errno));
	for (uint64_t left = m->size; left;) {
		size_t part = left < sizeof buffer ? (size_t)left : sizeof buffer;
		if (!read_fully(buffer, part))
			return false;
		for (size_t at = 0; at < part;) {
			ssize_t n = write(fd, buffer + at, part - at);
			if (n < 0)
				return fail(m->name, strerror(errno));
			at += (size_t)n;
		}
		left -= part;
	}
	if (close(fd) < 0)
		return fail(m->name, strerror(errno));
	return skip(padding(m->size));
}

static bool make(const struct member *m)
{
	struct stat st;
	char target[NAME_LIMIT];
	bool exists = lstat(m->name, &st) == 0;
	if (m->type == '5') {
		if (exists && stat(m->name, &st) == 0 && S_ISDIR(st.st_mode))
			return true; /* also a link to a directory, as /lib is in many images */
		if (exists && unlink(m->name) < 0)
			return fail(m->name, strerror(errno));
		return mkdir(m->name, 0700) == 0 || fail(m->name, strerror(errno));
	}
	if (exists && (S_ISDIR(st.st_mode) ? rmdir(m->name) : unlink(m->name)) < 0)
		return fail(m->name, strerror(errno));
	dev_t device = makedev(m->major, m->minor);
	int done = 0;
	switch (m->type) {
	case '0': case 0: case '7':
		return write_regular(m);
	case '1':
		if (!clean(m->link, target))
			return false;
		done = link(target, m->name);
		break;
	case '2':
		done = symlink(m->link, m->name);
		break;
	case '3':
		done = mknod(m->name, S_IFCHR | 0600, device);
		break;
	case '4':
		done = mknod(m->name, S_IFBLK | 0600, device);
		break;
	case '6':
		done = mkfifo(m->name, 0600);
		break;
	default:
		return fail(m->name, "has a type that is not supported");
	}
	return done == 0 || fail(m->name, strerror(errno));
}

static bool dress(const struct member *m)
{
	if (m->type == '1')
		return true;
	if (geteuid() == 0 && lchown(m->name, (uid_t)m->uid, (gid_t)m->gid) < 0)
		return fail(m->name, strerror(errno));
	if (m->type != '2' && chmod(m->name, m->mode) < 0) /* after chown, which clears set-id bits */
		return fail(m->name, strerror(errno));
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_sec = (time_t)m->mtime } };
	utimensat(AT_FDCWD, m->name, times, AT_SYMLINK_NOFOLLOW);
	return true;
}

static bool extra(uint64_t size, char **text)
{
	if (size > EXTRA_LIMIT)
		return fail("archive", "has an oversized extended header");
	free(*text);
	*text = must(malloc((size_t)size + 1));
	(*text)[size] = 0;
	return read_fully(*text, (size_t)size) && skip(padding(size));
}

/* Records of "LENGTH KEY=VALUE\n" (POSIX.1-2001 pax). */
static bool pax(char *text, size_t size, struct overrides *o)
{
	while (size) {
		char *end;
		unsigned long len = strtoul(text, &end, 10);
		if (len < 5 || len > size || *end != ' ' || text[len - 1] != '\n' || end - text > 9)
			return fail("archive", "has a damaged extended header");
		text[len - 1] = 0;
		char *key = end + 1, *value = key < text + len ? strchr(key, '=') : NULL;
		if (!value)
			return fail("archive", "has a damaged extended header");
		*value++ = 0;
		int64_t plain = strtoll(value, NULL, 10);
		if (strcmp(key, "path") == 0) {
			free(o->name);
			o->name = must(strdup(value));
		} else if (strcmp(key, "linkpath") == 0) {
			free(o->link);
			o->link = must(strdup(value));
		} else if (strcmp(key, "size") == 0) {
			o->size = plain;
		} else if (strcmp(key, "uid") == 0) {
			o->uid = plain;
		} else if (strcmp(key, "gid") == 0) {
			o->gid = plain;
		} else if (strcmp(key, "mtime") == 0) {
			o->mtime = plain;
		} else if (strncmp(key, "GNU.sparse.", 11) == 0) {
			return fail("archive", "has sparse files, which are not supported");
		}
		text += len;
		size -= len;
	}
	return true;
}

static void forget(struct overrides *o)
{
	free(o->name);
	free(o->link);
	*o = (struct overrides){ NULL, NULL, -1, -1, -1, -1 };
}

static bool one(const char *h, struct overrides *o)
{
	static struct member m;
	char *text = NULL;
	bool done = false;
	uint64_t size;
	if (strchr("xgLK", h[156]) && h[156]) {
		if (!checksum_holds(h) || !number(h + 124, 12, &size))
			return fail("archive", "has a damaged header");
		if (h[156] == 'L')
			return extra(size, &o->name);
		if (h[156] == 'K')
			return extra(size, &o->link);
		done = extra(size, &text) && (h[156] == 'g' || pax(text, (size_t)size, o));
		free(text);
		return done;
	}
	if (!header(h, o, &m))
		return false;
	bool regular = m.type == '0' || m.type == 0 || m.type == '7';
	if (!*m.name) /* the target itself keeps its owner and mode */
		done = !regular || skip(m.size + padding(m.size));
	else
		done = make_parents(m.name) && make(&m) && dress(&m);
	forget(o);
	return done;
}

int untar(const char *target)
{
	char path[NAME_LIMIT + 2], block[BLOCK];
	static const char zeros[BLOCK];
	struct overrides o = { NULL, NULL, -1, -1, -1, -1 };
	snprintf(path, sizeof path, "%s/", target + strspn(target, "/")); /* "/" alone has no parents */
	if (chdir("/") < 0 || (*path != '/' && !make_parents(path)) || chdir(target) < 0)
		return fail(target, strerror(errno)) + 1;
	for (;;) {
		if (!read_fully(block, BLOCK))
			return 1;
		if (memcmp(block, zeros, BLOCK) == 0)
			break;
		if (!one(block, &o))
			return 1;
	}
	forget(&o);
	while (read(0, block, BLOCK) > 0)
		; /* the second end block and padding */
	return 0;
}
