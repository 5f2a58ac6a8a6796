/* The survey: what runs in the guest and where it listens, as raw parts of /proc for the host to read.
 *
 * Runs in a child. A record is a line "KIND NUMBER LENGTH" and LENGTH bytes; see docs/agent-protocol.md. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
	PATH_SIZE = 300, MAX_PROCESSES = 8192, MAX_SPACES = 64, MAX_SOCKETS = 4096,
	SMALL = 16384, TABLE = 1 << 20,
};

static char spaces[MAX_SPACES][64]; /* network namespaces whose tables were sent */
static int space_count;

static void put_record(const char *kind, const char *number, const void *data, size_t len)
{
	printf("%s %s %zu\n", kind, number, len);
	fwrite(data, 1, len, stdout);
}

/* Sends at most `limit` bytes of a file; says whether there was anything. */
static bool put_file(const char *kind, const char *number, const char *path, size_t limit)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	char *data = must(malloc(limit));
	size_t len = 0;
	ssize_t n;
	while (len < limit && (n = read(fd, data + len, limit - len)) > 0)
		len += (size_t)n;
	close(fd);
	if (len)
		put_record(kind, number, data, len);
	free(data);
	return len;
}

static void put_sockets(const char *pid)
{
	static char numbers[MAX_SOCKETS * 12];
	char path[PATH_SIZE], target[64];
	size_t len = 0;
	snprintf(path, sizeof path, "/proc/%s/fd", pid);
	DIR *directory = opendir(path);
	struct dirent *entry;
	while (directory && (entry = readdir(directory))) {
		ssize_t n = readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1);
		unsigned long inode;
		if (n <= 0)
			continue;
		target[n] = 0;
		if (sscanf(target, "socket:[%lu]", &inode) == 1 && len + 24 < sizeof numbers)
			len += (size_t)sprintf(numbers + len, "%lu ", inode);
	}
	if (directory)
		closedir(directory);
	if (len)
		put_record("sockets", pid, numbers, len);
}

/* The tables of a namespace, with the first process that is found in it. */
static void put_tables(const char *pid)
{
	static const char *const tables[] = { "tcp", "tcp6", "udp", "udp6" };
	char path[PATH_SIZE], space[64];
	snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
	ssize_t n = readlink(path, space, sizeof space - 1);
	if (n <= 0 || space_count == MAX_SPACES)
		return;
	space[n] = 0;
	for (int i = 0; i < space_count; i++)
		if (strcmp(spaces[i], space) == 0)
			return;
	strcpy(spaces[space_count++], space);
	for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
		snprintf(path, sizeof path, "/proc/%s/net/%s", pid, tables[i]);
		put_file(tables[i], pid, path, TABLE);
	}
}

static void put_process(const char *pid)
{
	static const char *const files[] = { "status", "cgroup" };
	char path[PATH_SIZE];
	snprintf(path, sizeof path, "/proc/%s/cmdline", pid);
	if (!put_file("cmdline", pid, path, SMALL)) /* a thread of the kernel, or just gone */
		return;
	for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
		snprintf(path, sizeof path, "/proc/%s/%s", pid, files[i]);
		put_file(files[i], pid, path, SMALL);
	}
	put_sockets(pid);
	put_tables(pid);
}

static int work(void *argument)
{
	char number[24];
	pid_t agent = *(pid_t *)argument;
	snprintf(number, sizeof number, "%d", (int)agent);
	put_record("agent", number, "", 0);
	snprintf(number, sizeof number, "%d", (int)getpid());
	put_record("worker", number, "", 0);
	for (int i = 0; i < MAX_JOBS; i++) {
		const struct job *job = job_at(i);
		if (!job || !job->record)
			continue;
		snprintf(number, sizeof number, "%u", job->serial);
		put_record("job", number, job->record->id, strlen(job->record->id));
		snprintf(number, sizeof number, "%d", (int)job->pid);
		put_record("first", number, job->record->id, strlen(job->record->id));
	}
	put_file("passwd", "0", "/etc/passwd", TABLE);
	DIR *directory = opendir("/proc");
	struct dirent *entry;
	int left = MAX_PROCESSES;
	while (directory && left && (entry = readdir(directory)))
		if (strspn(entry->d_name, "0123456789") == strlen(entry->d_name)) {
			put_process(entry->d_name);
			left--;
		}
	if (directory)
		closedir(directory);
	return fflush(stdout) == 0 && directory ? 0 : 1;
}

void survey_request(struct stream *s, struct reader *in)
{
	uint32_t timeout = read_u32(in);
	pid_t agent = getpid();
	if (in->bad || !timeout) {
		stream_result(s, C_BAD_REQUEST, "a survey needs a timeout", NULL);
		return;
	}
	struct job *job = job_start(work, &agent, false, NULL, timeout);
	if (!job) {
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
		return;
	}
	job->quiet = true;
	job->finish = job_finish_worker;
	job_attach(job, s);
}
