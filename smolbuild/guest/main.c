/* Process 1 of the guest: one thread, one poll loop, nothing that blocks on one stream. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool is_guest;

static struct pollfd watched[4 + 3 * MAX_JOBS + 2 * MAX_STREAMS];
static int watched_count;
static int64_t wake_time;

int64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int watch(int fd, short events)
{
	if (watched_count == (int)(sizeof watched / sizeof *watched))
		return -1;
	watched[watched_count] = (struct pollfd){ .fd = fd, .events = events };
	return watched_count++;
}

short ready(int slot)
{
	return slot < 0 ? 0 : watched[slot].revents;
}

void wake_at(int64_t when_ms)
{
	if (when_ms < wake_time)
		wake_time = when_ms;
}

void say(const char *format, ...)
{
	va_list list;
	va_start(list, format);
	fputs("smolbuild-agent: ", stderr);
	vfprintf(stderr, format, list);
	fputc('\n', stderr);
	va_end(list);
}

void *must(void *allocated)
{
	if (!allocated) {
		say("out of memory");
		abort();
	}
	return allocated;
}

static int block_signals(void)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	signal(SIGPIPE, SIG_IGN);
	return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

static void drain_signals(int fd)
{
	struct signalfd_siginfo info[8];
	while (read(fd, info, sizeof info) > 0)
		;
}

static void loop(int signals)
{
	for (;;) {
		watched_count = 0;
		wake_time = INT64_MAX;
		int signal_slot = watch(signals, POLLIN);
		port_poll();
		jobs_poll();
		probes_poll();
		tunnels_poll();
		int64_t now = now_ms(), wait = -1;
		if (wake_time != INT64_MAX)
			wait = wake_time > now ? wake_time - now : 0;
		if (wait > 3600000)
			wait = 3600000;
		if (poll(watched, (nfds_t)watched_count, (int)wait) < 0) {
			if (errno == EINTR)
				continue;
			say("poll: %s", strerror(errno));
			abort();
		}
		if (ready(signal_slot)) {
			drain_signals(signals);
			jobs_reap();
		}
		jobs_serve();
		probes_serve();
		tunnels_serve();
		port_serve();
	}
}

/* Jobs' pipes must never land on the descriptors that children get. */
void fill_descriptors(void)
{
	int fd;
	while ((fd = open("/dev/null", O_RDWR)) >= 0 && fd <= 2)
		;
	if (fd > 2)
		close(fd);
}

int main(int argc, char **argv)
{
	int port;
	umask(022);
	if (argc == 3 && strcmp(argv[1], "--serve") == 0) {
		port = atoi(argv[2]);
		fill_descriptors();
		prctl(PR_SET_CHILD_SUBREAPER, 1);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	} else if (getpid() == 1) {
		is_guest = true;
		port = boot();
		setrlimit(RLIMIT_NOFILE, &(struct rlimit){ 65536, 1048576 });
	} else {
		fprintf(stderr, "usage: process 1 of a smolbuild guest, or %s --serve DESCRIPTOR\n",
			argv[0]);
		return 2;
	}
	int signals = block_signals();
	if (signals < 0) {
		say("signalfd: %s", strerror(errno));
		return 1;
	}
	jobs_setup();
	port_open(port);
	loop(signals);
}
