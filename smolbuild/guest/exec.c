/* Executions: EXEC and what can be asked about one. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EXEC_KEEP = 1, EXEC_TTY = 2, EXEC_STDIN = 4, EXEC_OFFLINE = 8, EXEC_SECRETS = 16 };
enum how { NEW, ATTACHED, RECORDED };

struct call {
	char **argv, **env;
	char *workdir, *user;
	bool offline, secrets;
};

static void free_list(char **list)
{
	for (char **item = list; list && *item; item++) {
		explicit_bzero(*item, strlen(*item));
		free(*item);
	}
	free(list);
}

static char **read_list(struct reader *in)
{
	uint32_t count = read_u32(in);
	if (in->bad || count > MAX_ARGS) {
		in->bad = true;
		return NULL;
	}
	char **list = must(calloc(count + 1, sizeof *list));
	for (uint32_t i = 0; i < count && !in->bad; i++)
		list[i] = read_text(in, MAX_PAYLOAD);
	return list;
}

/* A working directory that is not there is made, as container engines do. */
static void make_workdir(char *path)
{
	for (char *slash = path; is_guest && (slash = strchr(slash + 1, '/'));) {
		*slash = 0;
		mkdir(path, 0755);
		*slash = '/';
	}
	if (is_guest)
		mkdir(path, 0755);
}

static int run(void *argument)
{
	struct call *call = argument;
	char home[512] = "/";
	clearenv();
	setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
	make_workdir(call->workdir);
	if (call->offline && !leave_network())
		return 126;
	if (!become_user(call->user, home, sizeof home))
		return 126;
	setenv("HOME", home, 1);
	for (char **item = call->env; *item; item++)
		if (strchr(*item, '=') && **item != '=')
			putenv(*item);
	if (call->secrets && !secrets_to_environment())
		return 126;
	if (chdir(call->workdir) < 0) {
		dprintf(2, "smolbuild: cannot enter %s: %s\n", call->workdir, strerror(errno));
		return 126;
	}
	execvp(call->argv[0], call->argv);
	int missing = errno == ENOENT;
	dprintf(2, "smolbuild: cannot run %s: %s\n", call->argv[0], strerror(errno));
	return missing ? 127 : 126;
}

static void answer(struct stream *s, const struct record *record, enum how how, bool started)
{
	struct result out = { 0 };
	add_u8(&out, started ? 2 : 1);
	add_u8(&out, (uint8_t)how);
	add_u8(&out, record->timed_out);
	add_u32(&out, (uint32_t)record->status);
	stream_result(s, C_OK, NULL, &out);
	result_free(&out);
}

static void finish(struct job *job)
{
	struct stream *s = job->stream;
	job->stream = NULL;
	if (s)
		answer(s, job->record, NEW, false);
}

static void again(struct stream *s, struct record *record)
{
	if (record->job && !record->ended && record->job->keep)
		answer(s, record, ATTACHED, true);
	else if (record->job && record->job->finish && !record->job->keep)
		job_attach(record->job, s);
	else
		answer(s, record, RECORDED, false);
}

static void start(struct stream *s, const char *id, uint32_t flags, uint64_t timeout,
		  struct call *call, const struct window *window)
{
	struct record *record = record_add(id);
	if (!record) {
		stream_result(s, C_LIMIT, "this machine has run as many executions as it records",
			      NULL);
		return;
	}
	bool keep = flags & EXEC_KEEP;
	struct job *job = job_start(run, call, flags & EXEC_STDIN && !keep,
				    flags & EXEC_TTY ? window : NULL, keep ? 0 : timeout);
	if (!job) { /* it never ran: recorded as such, so that asking again does not run it either */
		record->ended = true;
		record->status = 126;
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
		return;
	}
	job->record = record;
	record->job = job;
	job->keep = keep;
	job->finish = finish;
	if (job->keep)
		answer(s, record, NEW, true);
	else
		job_attach(job, s);
}

static struct window read_window(struct reader *in)
{
	struct window window = { .rows = read_u32(in) };
	window.columns = read_u32(in);
	in->bad = in->bad || window.rows > UINT16_MAX || window.columns > UINT16_MAX;
	return window;
}

void exec_request(struct stream *s, struct reader *in)
{
	struct call call = { 0 };
	struct window window = { 0 };
	char *id = read_text(in, MAX_ID);
	uint32_t flags = read_u32(in);
	uint64_t timeout = read_u64(in);
	call.workdir = read_text(in, 4096);
	call.user = read_text(in, 512);
	call.argv = read_list(in);
	call.env = read_list(in);
	call.offline = flags & EXEC_OFFLINE;
	call.secrets = flags & EXEC_SECRETS;
	if (flags & EXEC_TTY)
		window = read_window(in);
	if (in->bad || !*id || !*call.workdir || !call.argv[0] || flags & ~31U)
		stream_result(s, C_BAD_REQUEST, "malformed exec request", NULL);
	else if (flags & EXEC_TTY && flags & EXEC_KEEP)
		stream_result(s, C_BAD_REQUEST, "a service has no terminal", NULL);
	else if (record_find(id))
		again(s, record_find(id));
	else
		start(s, id, flags, timeout, &call, &window);
	free(id);
	free(call.workdir);
	free(call.user);
	free_list(call.argv);
	free_list(call.env);
}

static struct record *named(struct stream *s, struct reader *in)
{
	char *id = read_text(in, MAX_ID);
	struct record *record = id ? record_find(id) : NULL;
	if (!id)
		stream_result(s, C_BAD_REQUEST, "malformed execution id", NULL);
	else if (!record)
		stream_result(s, C_UNKNOWN, "no execution has this id", NULL);
	free(id);
	return record;
}

void kill_request(struct stream *s, struct reader *in)
{
	struct record *record = named(s, in);
	uint32_t number = read_u32(in);
	if (!record)
		return;
	if (in->bad || number > 64) {
		stream_result(s, C_BAD_REQUEST, "no such signal", NULL);
		return;
	}
	if (record->job && number == 0)
		job_kill(record->job);
	else if (record->job && !record->ended)
		kill(record->job->pid, (int)number);
	stream_result(s, C_OK, NULL, NULL);
}

void status_request(struct stream *s, struct reader *in)
{
	struct record *record = named(s, in);
	if (record)
		answer(s, record, RECORDED, !record->ended);
}

void output_request(struct stream *s, struct reader *in)
{
	struct record *record = named(s, in);
	if (!record)
		return;
	if (record->job)
		job_ring_send(record->job, s);
	stream_result(s, C_OK, NULL, NULL);
}

void resize_request(struct stream *s, struct reader *in)
{
	struct record *record = named(s, in);
	struct window window = read_window(in);
	if (!record)
		return;
	if (in->bad || (record->job && !record->job->tty))
		stream_result(s, C_BAD_REQUEST, "no terminal, or no size of one", NULL);
	else if (record->job && record->job->fd[1] >= 0 && !pty_resize(record->job->fd[1], &window))
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
	else /* one that has ended: its person does not know that yet */
		stream_result(s, C_OK, NULL, NULL);
}
