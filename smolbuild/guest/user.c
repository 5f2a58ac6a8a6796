/* Users and groups, read from the guest's own files, in the child that is about to become one. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_LIMIT = 4 << 20, FIELDS = 7, MAX_GROUPS = 256 };

static char *read_file(const char *path)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > FILE_LIMIT)
		return strdup("");
	char *text = must(malloc((size_t)st.st_size + 1));
	size_t len = 0;
	ssize_t n;
	while (len < (size_t)st.st_size &&
	       (n = read(fd, text + len, (size_t)st.st_size - len)) > 0)
		len += (size_t)n;
	text[len] = 0;
	close(fd);
	return text;
}

/* Cuts the next line at its colons; missing fields are empty. */
static bool next(char **text, char *field[FIELDS])
{
	char *line = strsep(text, "\n");
	if (!line)
		return false;
	for (int i = 0; i < FIELDS; i++) {
		char *part = strsep(&line, ":");
		field[i] = part ? part : "";
	}
	return true;
}

static bool number(const char *text, uint32_t *value)
{
	char *end;
	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	unsigned long long parsed = strtoull(text, &end, 10);
	if (*end || errno || parsed > UINT32_MAX - 1)
		return false;
	*value = (uint32_t)parsed;
	return true;
}

static bool find_user(const char *name, uint32_t *uid, uint32_t *gid, char *login, char *home,
		      size_t home_size)
{
	char *text = read_file("/etc/passwd"), *field[FIELDS];
	uint32_t wanted = 0;
	bool numeric = number(name, &wanted);
	while (next(&text, field)) {
		uint32_t u, g;
		if (!number(field[2], &u) || !number(field[3], &g))
			continue;
		if (strcmp(field[0], name) != 0 && !(numeric && u == wanted))
			continue;
		*uid = u;
		*gid = g;
		snprintf(login, 256, "%s", field[0]);
		if (*field[5])
			snprintf(home, home_size, "%s", field[5]);
		return true;
	}
	*uid = wanted;
	*gid = 0;
	return numeric;
}

static bool find_group(const char *name, uint32_t *gid)
{
	char *text = read_file("/etc/group"), *field[FIELDS];
	while (next(&text, field))
		if (strcmp(field[0], name) == 0 && number(field[2], gid))
			return true;
	return number(name, gid);
}

static bool is_member(char *members, const char *login)
{
	char *member;
	while ((member = strsep(&members, ",")))
		if (strcmp(member, login) == 0)
			return true;
	return false;
}

static size_t groups_of(const char *login, gid_t gid, gid_t *groups)
{
	char *text = read_file("/etc/group"), *field[FIELDS];
	size_t count = 1;
	groups[0] = gid;
	while (*login && next(&text, field) && count < MAX_GROUPS) {
		uint32_t group;
		if (number(field[2], &group) && group != gid && is_member(field[3], login))
			groups[count++] = group;
	}
	return count;
}

/* False, said on standard error, when there is no such user or group. */
static bool look_up(const char *user, uint32_t *uid, uint32_t *gid, char login[256], char *home,
		    size_t home_size, bool *one_group)
{
	char name[512];
	snprintf(name, sizeof name, "%s", *user ? user : "root");
	char *group = strchr(name, ':');
	if (group)
		*group++ = 0;
	if (strcmp(name, "root") == 0) { /* needs no file, so it works in any image */
		*uid = *gid = 0;
		snprintf(login, 256, "root");
		snprintf(home, home_size, "/root");
		uint32_t u, g;
		find_user(name, &u, &g, login, home, home_size);
	} else if (!find_user(name, uid, gid, login, home, home_size)) {
		dprintf(2, "smolbuild: /etc/passwd has no user %s\n", name);
		return false;
	}
	if (group && !find_group(group, gid)) {
		dprintf(2, "smolbuild: /etc/group has no group %s\n", group);
		return false;
	}
	*one_group = group != NULL;
	return true;
}

bool user_ids(const char *user, uid_t *uid, gid_t *gid)
{
	char login[256] = "", home[512];
	bool one_group;
	return look_up(user, uid, gid, login, home, sizeof home, &one_group);
}

bool become_user(const char *user, char *home, size_t home_size)
{
	char login[256] = "";
	uint32_t uid, gid;
	bool one_group;
	gid_t groups[MAX_GROUPS];
	if (!is_guest && geteuid() != 0)
		return true; /* a test without root: there is nobody else to become */
	if (!look_up(user, &uid, &gid, login, home, home_size, &one_group))
		return false;
	size_t count = one_group ? 1 : groups_of(login, gid, groups);
	groups[0] = gid;
	if (isatty(0) && fchown(0, uid, (gid_t)-1) < 0) /* some programs open it again by its name */
		dprintf(2, "smolbuild: the terminal stays root's: %s\n", strerror(errno));
	if (setgroups(count, groups) < 0 || setgid(gid) < 0 || setuid(uid) < 0) {
		dprintf(2, "smolbuild: cannot become %s: %s\n", user, strerror(errno));
		return false;
	}
	return true;
}
