/* Jobs: child processes with their pipes, deadline and control group. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CGROUPS "/sys/fs/cgroup/smolbuild"

static struct job jobs[MAX_JOBS];
static uint32_t last_serial;
static int groups_to_remove;

static void on_input(void *owner);
static void on_gone(void *owner);
static const struct stream_owner calls = { on_input, on_gone };

const struct job *job_at(int place)
{
	return jobs[place].used ? &jobs[place] : NULL;
}

void jobs_setup(void)
{
	if (is_guest && mkdir(CGROUPS, 0755) < 0 && errno != EEXIST)
		say("%s: %s", CGROUPS, strerror(errno));
}

static void group_path(char *path, size_t size, uint32_t serial, const char *file)
{
	snprintf(path, size, CGROUPS "/%u%s", serial, file);
}

static void child_setup(const struct job *job, const int ends[3])
{
	sigset_t none;
	if (job->cgroup) {
		char path[64];
		group_path(path, sizeof path, job->serial, "/cgroup.procs");
		int fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd < 0 || write(fd, "0", 1) != 1)
			_exit(126);
	}
	setsid();
	for (int i = 0; i < 3; i++) /* the ends are above 2: 0 to 2 are the console's */
		if (dup2(ends[i], i) < 0)
			_exit(126);
	if (job->tty && !pty_control())
		_exit(126);
	if (syscall(SYS_close_range, 3U, ~0U, 0U) < 0)
		for (int fd = 3; fd < 65536; fd++)
			close(fd);
	for (int number = 1; number < 65; number++)
		signal(number, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static bool make_pipes(struct job *job, int ends[3], bool with_stdin)
{
	int pair[2];
	for (int i = 0; i < 3; i++) {
		if (i == 0 && !with_stdin) {
			ends[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
			if (ends[0] < 0)
				return false;
			continue;
		}
		if (pipe2(pair, O_CLOEXEC) < 0)
			return false;
		ends[i] = pair[i != 0];
		job->fd[i] = pair[i == 0];
		fcntl(job->fd[i], F_SETFL, O_NONBLOCK);
	}
	return true;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

struct job *job_start(int (*child)(void *), void *argument, bool with_stdin,
		      const struct window *window, uint64_t timeout_ms)
{
	struct job *job = NULL;
	int ends[3];
	char path[64];
	for (int i = 0; i < MAX_JOBS && !job; i++)
		if (!jobs[i].used)
			job = &jobs[i];
	if (!job) {
		errno = EAGAIN;
		return NULL;
	}
	*job = (struct job){ .used = true, .serial = ++last_serial, .tty = window };
	for (int i = 0; i < 3; i++)
		ends[i] = job->fd[i] = job->slot[i] = -1;
	pid_t pid = -1;
	if (window ? pty_open(job, ends, window) : make_pipes(job, ends, with_stdin)) {
		group_path(path, sizeof path, job->serial, "");
		job->cgroup = is_guest && mkdir(path, 0755) == 0;
		pid = fork();
		if (pid == 0) {
			child_setup(job, ends);
			_exit(child(argument));
		}
	}
	int saved = errno;
	for (int i = 0; i < 3; i++)
		close_fd(&ends[i]);
	if (pid < 0) {
		for (int i = 0; i < 3; i++)
			close_fd(&job->fd[i]);
		if (job->cgroup)
			rmdir(path);
		job->used = false;
		errno = saved;
		return NULL;
	}
	job->pid = pid;
	job->deadline = timeout_ms && timeout_ms < INT64_MAX / 2 ?
		now_ms() + (int64_t)timeout_ms : INT64_MAX;
	job->drain_until = INT64_MAX;
	return job;
}

void job_attach(struct job *job, struct stream *s)
{
	if (job->stream) {
		struct stream *old = job->stream;
		job->stream = NULL;
		stream_own(old, NULL, NULL);
		stream_reset(old, "another request attached to this execution");
	}
	job->stream = s;
	stream_own(s, &calls, job);
}

void job_kill(struct job *job)
{
	if (job->cgroup) {
		char path[64];
		group_path(path, sizeof path, job->serial, "/cgroup.kill");
		int fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd >= 0) {
			if (write(fd, "1", 1) != 1)
				say("%s: %s", path, strerror(errno));
			close(fd);
		}
	}
	if (!job->exited) { /* also when the child has not joined its group yet */
		kill(-job->pid, SIGKILL);
		kill(job->pid, SIGKILL);
	} else if (!job->cgroup && !job->keep) {
		kill(-job->pid, SIGKILL);
	}
}

static void on_input(void *owner)
{
	struct job *job = owner;
	if (stream_drain(job->stream, job->fd[0]) < 0) {
		close_fd(&job->fd[0]);
		stream_drain(job->stream, -1);
	}
	if (!stream_at_end(job->stream) || job->fd[0] < 0)
		return;
	/* A terminal has no end, only a character that says so to who reads it line by line. */
	if (job->tty && write(job->fd[0], "\4", 1) < 0)
		say("end of a terminal: %s", strerror(errno));
	close_fd(&job->fd[0]);
}

/* The host let go: an execution with an id lives on unattended, a worker is of no use to anybody. */
static void on_gone(void *owner)
{
	struct job *job = owner;
	job->stream = NULL;
	close_fd(&job->fd[0]);
	if (!job->record)
		job_kill(job);
}

static void ring_add(struct job *job, const uint8_t *data, size_t len)
{
	if (!job->ring)
		job->ring = must(malloc(RING));
	for (size_t i = 0; i < len; i++) {
		job->ring[job->ring_at] = data[i];
		job->ring_at = (job->ring_at + 1) % RING;
	}
	job->ring_len = job->ring_len + len < RING ? job->ring_len + len : RING;
}

static size_t ring_copy(const struct job *job, uint8_t *target)
{
	size_t start = (job->ring_at + RING - job->ring_len) % RING;
	for (size_t i = 0; i < job->ring_len; i++)
		target[i] = job->ring[(start + i) % RING];
	return job->ring_len;
}

void job_ring_send(struct job *job, struct stream *s)
{
	static uint8_t copy[RING];
	size_t len = ring_copy(job, copy);
	for (size_t at = 0; at < len; at += MAX_DATA)
		stream_data(s, CH_OUT, copy + at, len - at < MAX_DATA ? len - at : MAX_DATA);
	explicit_bzero(copy, len);
}

static bool to_ring(const struct job *job, int which)
{
	return !job->stream || (job->quiet && which == CH_ERR);
}

static size_t room(const struct job *job, int which)
{
	if (to_ring(job, which))
		return MAX_DATA;
	size_t credit = port_congested() ? 0 : stream_credit(job->stream);
	return credit < MAX_DATA ? credit : MAX_DATA;
}

/* Reads once; false when nothing was there. */
static bool pump(struct job *job, int which)
{
	static uint8_t buffer[MAX_DATA];
	size_t size = room(job, which);
	if (!size || job->fd[which] < 0)
		return false;
	ssize_t n = read(job->fd[which], buffer, size);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (n <= 0) {
		close_fd(&job->fd[which]);
		return true;
	}
	if (to_ring(job, which))
		ring_add(job, buffer, (size_t)n);
	else
		stream_data(job->stream, (uint8_t)which, buffer, (size_t)n);
	explicit_bzero(buffer, (size_t)n); /* what a program wrote may have been a secret */
	return true;
}

static void release(struct job *job)
{
	for (int i = 0; i < 3; i++)
		close_fd(&job->fd[i]);
	groups_to_remove += job->cgroup;
	if (job->record && job->keep)
		return; /* its output may be asked for; the slot stays */
	if (job->record)
		job->record->job = NULL;
	if (job->ring)
		explicit_bzero(job->ring, RING);
	free(job->ring);
	job->used = false;
}

static void settle(struct job *job)
{
	if (!job->exited || job->fd[1] >= 0 || job->fd[2] >= 0)
		return;
	if (job->finish) {
		void (*finish)(struct job *) = job->finish;
		job->finish = NULL;
		finish(job);
		release(job);
	}
}

void job_finish_worker(struct job *job)
{
	static uint8_t copy[RING + 1];
	if (!job->stream)
		return;
	size_t len = ring_copy(job, copy);
	copy[len] = 0;
	char *text = (char *)copy + (len > 2000 ? len - 2000 : 0);
	char *end = strchr(text, '\n');
	if (end)
		*end = 0;
	enum code code = job->timed_out ? C_DEADLINE : job->status ? C_SYSTEM : C_OK;
	if (job->timed_out)
		text = "not done in time";
	else if (job->status && !*text)
		text = "the worker process failed";
	stream_result(job->stream, code, code == C_OK ? "" : text, NULL);
	job->stream = NULL;
}

void jobs_poll(void)
{
	for (struct job *job = jobs; job < jobs + MAX_JOBS; job++) {
		if (!job->used)
			continue;
		for (int i = 0; i < 3; i++)
			job->slot[i] = -1;
		if (job->fd[0] >= 0 && job->stream && stream_has_input(job->stream))
			job->slot[0] = watch(job->fd[0], POLLOUT);
		for (int i = 1; i < 3; i++)
			if (job->fd[i] >= 0 && room(job, i))
				job->slot[i] = watch(job->fd[i], POLLIN);
		if (!job->exited)
			wake_at(job->deadline);
		if (job->finish)
			wake_at(job->drain_until);
	}
}

static void check_time(struct job *job)
{
	int64_t now = now_ms();
	if (!job->exited && now >= job->deadline) {
		job->timed_out = true;
		job->deadline = INT64_MAX;
		if (job->record)
			job->record->timed_out = true;
		job_kill(job);
	}
	if (now < job->drain_until)
		return;
	/* Somebody outside the group holds a pipe, or the host has not yet taken the output. */
	for (int i = 1; i < 3; i++)
		if (job->fd[i] >= 0 && room(job, i) && !pump(job, i))
			close_fd(&job->fd[i]);
	job->drain_until = now + DRAIN_MS;
}

void jobs_serve(void)
{
	for (struct job *job = jobs; job < jobs + MAX_JOBS; job++) {
		if (!job->used)
			continue;
		if (ready(job->slot[0]) && job->stream)
			on_input(job);
		for (int i = 1; i < 3; i++)
			if (ready(job->slot[i]))
				pump(job, i);
		check_time(job);
		settle(job);
	}
}

static void ended(struct job *job, int status)
{
	job->exited = true;
	job->status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	close_fd(&job->fd[0]);
	if (job->record) {
		job->record->ended = true;
		job->record->status = job->status;
	}
	if (job->keep) /* what it started in the background is the service */
		return;
	job_kill(job);
	job->drain_until = now_ms() + DRAIN_MS;
	for (int i = 0; i < 16 && (pump(job, CH_OUT) || pump(job, CH_ERR)); i++)
		; /* what is already there goes at once */
	settle(job);
}

static void remove_groups(void)
{
	DIR *directory = opendir(CGROUPS);
	struct dirent *entry;
	if (!directory)
		return;
	while ((entry = readdir(directory))) {
		char *end;
		unsigned long serial = strtoul(entry->d_name, &end, 10);
		bool live = *end != 0 || end == entry->d_name;
		for (int i = 0; i < MAX_JOBS && !live; i++)
			live = jobs[i].used && jobs[i].serial == serial && !jobs[i].exited;
		if (!live && unlinkat(dirfd(directory), entry->d_name, AT_REMOVEDIR) == 0)
			groups_to_remove--;
	}
	closedir(directory);
}

void jobs_reap(void)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
		for (int i = 0; i < MAX_JOBS; i++)
			if (jobs[i].used && !jobs[i].exited && jobs[i].pid == pid) {
				ended(&jobs[i], status);
				break;
			}
	if (groups_to_remove > 0)
		remove_groups();
}
