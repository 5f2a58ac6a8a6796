/* Secrets: files in memory that exist only while a step that was given them runs. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define PLACE "/run/secrets"
enum { MAX_SECRETS = 64, MAX_NAME = 128, TAKE = 0, GIVE = 1 };

struct secret {
	char name[MAX_NAME];
	const uint8_t *value; /* in the request */
	size_t len;
};
struct gift {
	char user[512];
	struct secret secrets[MAX_SECRETS];
	uint32_t count;
};

static bool plain_name(const char *name)
{
	if (!*name || (*name >= '0' && *name <= '9'))
		return false;
	for (; *name; name++)
		if (!(*name >= '0' && *name <= '9') && !((*name | 32) >= 'a' && (*name | 32) <= 'z') &&
		    *name != '_')
			return false;
	return true;
}

static void path_of(char path[sizeof PLACE + MAX_NAME], const char *name)
{
	snprintf(path, sizeof PLACE + MAX_NAME, PLACE "/%.*s", MAX_NAME - 1, name);
}

static bool write_secret(const struct secret *secret, uid_t uid, gid_t gid)
{
	char path[sizeof PLACE + MAX_NAME];
	path_of(path, secret->name);
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0400);
	if (fd < 0)
		return false;
	bool done = fchown(fd, uid, gid) == 0 && fchmod(fd, 0400) == 0;
	for (size_t at = 0; done && at < secret->len;) {
		ssize_t n = write(fd, secret->value + at, secret->len - at);
		if (n < 0 && errno == EINTR)
			continue;
		done = n > 0;
		at += done ? (size_t)n : 0;
	}
	return close(fd) == 0 && done;
}

/* In a child, whose copy of the request ends with it: looking up the user reads the disk. */
static int give(void *argument)
{
	const struct gift *gift = argument;
	uid_t uid;
	gid_t gid;
	if (!user_ids(gift->user, &uid, &gid))
		return 1;
	if (mkdir(PLACE, 0755) < 0 && errno != EEXIST) {
		dprintf(2, PLACE ": %s\n", strerror(errno));
		return 1;
	}
	if (mount("tmpfs", PLACE, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC,
		  "mode=0755,size=1m,nr_inodes=128") < 0) {
		dprintf(2, "mount " PLACE ": %s\n", strerror(errno));
		return 1;
	}
	for (uint32_t i = 0; i < gift->count; i++)
		if (!write_secret(&gift->secrets[i], uid, gid)) {
			dprintf(2, PLACE "/%s: %s\n", gift->secrets[i].name, strerror(errno));
			return 1;
		}
	return 0;
}

static void overwrite(int directory, const char *name)
{
	static const uint8_t zeros[4096];
	struct stat st;
	int fd = openat(directory, name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
		for (off_t at = 0; at < st.st_size; at += (off_t)sizeof zeros)
			if (pwrite(fd, zeros, sizeof zeros, at) < 0)
				break;
	close(fd);
	unlinkat(directory, name, 0);
}

/* Whoever still holds a file open, or has a mapping of it, reads zeros. */
static int take(void *unused)
{
	(void)unused;
	DIR *directory = opendir(PLACE);
	struct dirent *entry;
	while (directory && (entry = readdir(directory)))
		if (*entry->d_name != '.')
			overwrite(dirfd(directory), entry->d_name);
	if (directory)
		closedir(directory);
	while (umount2(PLACE, MNT_DETACH) == 0)
		;
	if (errno != EINVAL && errno != ENOENT) {
		dprintf(2, "umount " PLACE ": %s\n", strerror(errno));
		return 1;
	}
	if (rmdir(PLACE) < 0 && errno != ENOENT && errno != ENOTEMPTY) {
		dprintf(2, PLACE ": %s\n", strerror(errno));
		return 1;
	}
	return 0;
}

static bool read_gift(struct gift *gift, struct reader *in)
{
	read_into(in, gift->user, sizeof gift->user);
	gift->count = read_u32(in);
	if (in->bad || gift->count > MAX_SECRETS)
		return false;
	for (uint32_t i = 0; i < gift->count; i++) {
		struct secret *secret = &gift->secrets[i];
		read_into(in, secret->name, sizeof secret->name);
		secret->len = read_u32(in);
		secret->value = read_bytes(in, secret->len);
		if (in->bad || !plain_name(secret->name))
			return false;
	}
	return true;
}

void secrets_request(struct stream *s, struct reader *in)
{
	static struct gift gift;
	uint32_t timeout = read_u32(in);
	uint8_t what = read_u8(in);
	if (what > GIVE || (what == GIVE && !read_gift(&gift, in)) || in->bad)
		stream_result(s, C_BAD_REQUEST, "malformed secrets request", NULL);
	else if (!is_guest)
		stream_result(s, C_NOT_A_GUEST, "only the agent of a guest does this", NULL);
	else
		worker_start(s, what == GIVE ? give : take, &gift, timeout);
	explicit_bzero(&gift, sizeof gift);
}

/* Of an execution: NAME and NAME_FILE for each secret, read as the user it runs as. */
bool secrets_to_environment(void)
{
	static char value[131072 - MAX_NAME]; /* what the kernel takes in one variable */
	char path[sizeof PLACE + MAX_NAME], variable[MAX_NAME + 6];
	DIR *directory = opendir(PLACE);
	struct dirent *entry;
	bool done = directory != NULL;
	while (done && (entry = readdir(directory))) {
		if (*entry->d_name == '.')
			continue;
		snprintf(variable, sizeof variable, "%.*s_FILE", MAX_NAME, entry->d_name);
		path_of(path, entry->d_name);
		int fd = openat(dirfd(directory), entry->d_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		size_t len = 0;
		ssize_t n = -1;
		while (fd >= 0 && len < sizeof value - 1 &&
		       (n = read(fd, value + len, sizeof value - 1 - len)) > 0)
			len += (size_t)n;
		if (fd >= 0)
			close(fd);
		value[len] = 0;
		done = n == 0 && setenv(variable, path, 1) == 0;
		/* A value with a NUL inside cannot be a variable: there is the file. */
		if (len && value[len - 1] == '\n')
			value[--len] = 0;
		if (done && !memchr(value, 0, len))
			done = setenv(entry->d_name, value, 1) == 0;
	}
	if (directory)
		closedir(directory);
	if (!done)
		dprintf(2, "smolbuild: cannot read " PLACE ": %s\n", strerror(errno));
	return done;
}
