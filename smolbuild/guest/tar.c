/* Packs a path as a tar stream to stdout, sorted, with PAX headers where needed. Runs in a child. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { BLOCK = 512, NAME_LIMIT = 4096, DEPTH = 256, MAX_LINKS = 65536 };

static struct {
	dev_t device;
	ino_t inode;
	char *name;
} *links;
static size_t link_count;

static bool fail(const char *what, int error)
{
	dprintf(2, "%.3000s: %s\n", what, strerror(error));
	return false;
}

static bool put(const void *data, size_t len)
{
	const uint8_t *at = data;
	while (len) {
		ssize_t n = write(1, at, len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return fail("archive", errno);
		at += n;
		len -= (size_t)n;
	}
	return true;
}

static bool pad(uint64_t size)
{
	static const char zeros[BLOCK];
	return put(zeros, (size_t)(-size & (BLOCK - 1)));
}

static void octal(char *field, int width, uint64_t value)
{
	snprintf(field, (size_t)width, "%0*llo", width - 1, (unsigned long long)value);
}

static bool block(char type, const char *name, const char *link, const struct stat *st, uint64_t size)
{
	char h[BLOCK] = { 0 };
	unsigned sum = 0;
	memcpy(h, name, strnlen(name, 100));
	octal(h + 100, 8, st->st_mode & 07777);
	octal(h + 108, 8, st->st_uid & 07777777);
	octal(h + 116, 8, st->st_gid & 07777777);
	octal(h + 124, 12, size & 077777777777);
	octal(h + 136, 12, (uint64_t)st->st_mtime & 077777777777);
	h[156] = type;
	memcpy(h + 157, link, strnlen(link, 100));
	memcpy(h + 257, "ustar\0" "00", 8);
	octal(h + 329, 8, type == '3' || type == '4' ? major(st->st_rdev) & 07777777 : 0);
	octal(h + 337, 8, type == '3' || type == '4' ? minor(st->st_rdev) & 07777777 : 0);
	memset(h + 148, ' ', 8);
	for (int i = 0; i < BLOCK; i++)
		sum += (uint8_t)h[i];
	snprintf(h + 148, 8, "%06o", sum);
	return put(h, BLOCK);
}

static size_t record(char *to, const char *key, const char *value)
{
	size_t rest = strlen(key) + strlen(value) + 3, len = rest, before;
	do {
		before = len;
		len = rest + (size_t)snprintf(NULL, 0, "%zu", before);
	} while (len != before);
	return (size_t)sprintf(to, "%zu %s=%s\n", len, key, value);
}

static bool head(char type, const char *name, const char *link, const struct stat *st, uint64_t size)
{
	static char text[2 * NAME_LIMIT + 256];
	char digits[24];
	size_t len = 0;
	if (strlen(name) > 100)
		len += record(text + len, "path", name);
	if (strlen(link) > 100)
		len += record(text + len, "linkpath", link);
	if (size > 077777777777) {
		snprintf(digits, sizeof digits, "%llu", (unsigned long long)size);
		len += record(text + len, "size", digits);
	}
	if (st->st_uid > 07777777) {
		snprintf(digits, sizeof digits, "%u", st->st_uid);
		len += record(text + len, "uid", digits);
	}
	if (st->st_gid > 07777777) {
		snprintf(digits, sizeof digits, "%u", st->st_gid);
		len += record(text + len, "gid", digits);
	}
	struct stat plain = { .st_mode = 0644 };
	if (len && !(block('x', "././@PaxHeader", "", &plain, len) && put(text, len) && pad(len)))
		return false;
	return block(type, name, link, st, size);
}

static bool regular(int dir, const char *entry, const char *name, const struct stat *st)
{
	static char buffer[65536];
	int fd = openat(dir, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return fail(name, errno);
	uint64_t size = (uint64_t)st->st_size, left = size;
	bool good = head('0', name, "", st, size);
	while (good && left) {
		size_t part = left < sizeof buffer ? (size_t)left : sizeof buffer;
		ssize_t n = read(fd, buffer, part);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			good = fail(name, errno);
		if (n == 0) { /* it shrank meanwhile: the announced size is kept with zeros */
			memset(buffer, 0, part);
			n = (ssize_t)part;
		}
		good = good && put(buffer, (size_t)n);
		left -= n > 0 ? (uint64_t)n : 0;
	}
	close(fd);
	return good && pad(size);
}

static const char *earlier(const struct stat *st, const char *name)
{
	if (st->st_nlink < 2)
		return NULL;
	for (size_t i = 0; i < link_count; i++)
		if (links[i].inode == st->st_ino && links[i].device == st->st_dev)
			return links[i].name;
	if (link_count < MAX_LINKS) { /* beyond that, links become copies */
		if ((link_count & (link_count - 1)) == 0)
			links = must(realloc(links, (link_count ? link_count * 2 : 1) *
					     sizeof *links));
		links[link_count].device = st->st_dev;
		links[link_count].inode = st->st_ino;
		links[link_count++].name = must(strdup(name));
	}
	return NULL;
}

static bool directory(int dir, const char *entry, const char *name, const struct stat *st,
		      dev_t device, int depth);

static bool member(int dir, const char *entry, const char *name, dev_t device, int depth)
{
	struct stat st;
	char target[NAME_LIMIT];
	if (fstatat(dir, entry, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT || fail(name, errno); /* it went away meanwhile */
	if (!device)
		device = st.st_dev;
	if (S_ISDIR(st.st_mode))
		return directory(dir, entry, name, &st, device, depth);
	const char *first = earlier(&st, name);
	if (first)
		return head('1', name, first, &st, 0);
	ssize_t len;
	switch (st.st_mode & S_IFMT) {
	case S_IFREG:
		return regular(dir, entry, name, &st);
	case S_IFLNK:
		len = readlinkat(dir, entry, target, sizeof target - 1);
		if (len < 0)
			return fail(name, errno);
		target[len] = 0;
		return head('2', name, target, &st, 0);
	case S_IFCHR:
		return head('3', name, "", &st, 0);
	case S_IFBLK:
		return head('4', name, "", &st, 0);
	case S_IFIFO:
		return head('6', name, "", &st, 0);
	default:
		return true; /* a socket means nothing without its process */
	}
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static char **list(DIR *open_directory, size_t *count)
{
	char **names = NULL;
	struct dirent *entry;
	*count = 0;
	while ((entry = readdir(open_directory))) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if ((*count & (*count - 1)) == 0)
			names = must(realloc(names, (*count ? *count * 2 : 1) * sizeof *names));
		names[(*count)++] = must(strdup(entry->d_name));
	}
	if (*count)
		qsort(names, *count, sizeof *names, by_name);
	return names;
}

static bool directory(int dir, const char *entry, const char *name, const struct stat *st,
		      dev_t device, int depth)
{
	char path[NAME_LIMIT];
	size_t count;
	if (depth >= DEPTH || strlen(name) + 2 > sizeof path)
		return fail(name, ENAMETOOLONG);
	snprintf(path, sizeof path, "%s/", name);
	if (!head('5', path, "", st, 0))
		return false;
	if (st->st_dev != device) /* another file system: its mount point only */
		return true;
	int fd = openat(dir, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	DIR *open_directory = fd < 0 ? NULL : fdopendir(fd);
	if (!open_directory)
		return fail(name, errno);
	char **names = list(open_directory, &count);
	bool good = true;
	for (size_t i = 0; i < count; i++) {
		int len = snprintf(path, sizeof path, "%s/%s", name, names[i]);
		if (good && len >= (int)sizeof path)
			good = fail(name, ENAMETOOLONG);
		good = good && member(fd, names[i], path, device, depth + 1);
		free(names[i]);
	}
	free(names);
	closedir(open_directory);
	return good;
}

int tar_path(const char *path)
{
	static const char zeros[2 * BLOCK];
	char *copy = must(strdup(path));
	size_t len = strlen(copy);
	struct stat st;
	while (len > 1 && copy[len - 1] == '/')
		copy[--len] = 0;
	if (lstat(copy, &st) < 0)
		return fail(path, errno) + 1;
	char *slash = strrchr(copy, '/');
	const char *name = slash && slash[1] ? slash + 1 : ".";
	return member(AT_FDCWD, copy, name, 0, 0) && put(zeros, sizeof zeros) ? 0 : 1;
}

struct copy {
	char *path;
	bool in;
};

static int work(void *argument)
{
	struct copy *copy = argument;
	return copy->in ? untar(copy->path) : tar_path(copy->path);
}

void copy_request(struct stream *s, struct reader *in, bool put_in)
{
	uint64_t timeout = read_u64(in);
	struct copy copy = { read_text(in, NAME_LIMIT - 2), put_in };
	if (in->bad || *copy.path != '/') {
		stream_result(s, C_BAD_REQUEST, "a copy needs an absolute path in the guest", NULL);
	} else {
		struct job *job = job_start(work, &copy, put_in, NULL, timeout);
		if (!job) {
			stream_result(s, C_SYSTEM, strerror(errno), NULL);
		} else {
			job->quiet = true;
			job->finish = job_finish_worker;
			job_attach(job, s);
		}
	}
	free(copy.path);
}
