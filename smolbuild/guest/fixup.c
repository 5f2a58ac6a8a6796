/* What makes a restored machine its own: clock, entropy, names; and freezing before a checkpoint. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* linux/fs.h and linux/random.h, which musl does not bring */
#define FIFREEZE _IOWR('X', 119, int)
#define FITHAW _IOWR('X', 120, int)
#define RNDADDENTROPY _IOW('R', 0x03, int[2])
#define RNDRESEEDCRNG _IO('R', 0x07)

#define BOOT_ID "/proc/sys/kernel/random/boot_id"
#define OUR_BOOT_ID "/run/smolbuild/boot_id"

enum { ENTROPY = 64, SSH_HOST_KEYS = 1 };

static bool guest_only(struct stream *s)
{
	if (!is_guest)
		stream_result(s, C_NOT_A_GUEST, "only the agent of a guest does this", NULL);
	return is_guest;
}

static void read_line(const char *path, char *line, size_t size)
{
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, line, size - 1);
	line[n > 0 ? n : 0] = 0;
	line[strcspn(line, "\n")] = 0;
	if (fd >= 0)
		close(fd);
}

static void identify(struct stream *s)
{
	struct result out = { 0 };
	struct timespec t;
	char line[128];
	uint8_t random[32];
	read_line("/etc/machine-id", line, sizeof line);
	add_text(&out, line);
	read_line(BOOT_ID, line, sizeof line);
	add_text(&out, line);
	if (getrandom(random, sizeof random, GRND_NONBLOCK) != sizeof random) {
		stream_result(s, C_SYSTEM, "the kernel has no randomness yet", NULL);
		return;
	}
	add_bytes(&out, random, sizeof random);
	clock_gettime(CLOCK_REALTIME, &t);
	add_u64(&out, (uint64_t)t.tv_sec);
	add_u32(&out, (uint32_t)t.tv_nsec);
	stream_result(s, C_OK, NULL, &out);
	free(out.data);
}

void identity_request(struct stream *s)
{
	identify(s);
}

static int on_root(unsigned long what)
{
	int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int done = fd < 0 ? -1 : ioctl(fd, what, 0);
	if (fd >= 0)
		close(fd);
	return done;
}

static int thaw(void)
{
	return on_root(FITHAW) < 0 && errno != EINVAL ? -1 : 0; /* EINVAL: it was not frozen */
}

static int stir(const uint8_t *bytes)
{
	struct {
		int bits, size;
		uint8_t bytes[ENTROPY];
	} pool = { ENTROPY * 8, ENTROPY, { 0 } };
	memcpy(pool.bytes, bytes, ENTROPY);
	int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC), done = -1;
	if (fd >= 0 && ioctl(fd, RNDADDENTROPY, &pool) == 0)
		done = ioctl(fd, RNDRESEEDCRNG);
	if (fd >= 0)
		close(fd);
	explicit_bzero(&pool, sizeof pool);
	return done;
}

/* The kernel makes its boot id once; a file with a fresh one is mounted over it. */
static int new_boot_id(void)
{
	static bool mounted;
	uint8_t b[16];
	char text[40];
	if (getrandom(b, sizeof b, GRND_NONBLOCK) != sizeof b)
		return -1;
	b[6] = (b[6] & 15) | 64;
	b[8] = (b[8] & 63) | 128;
	snprintf(text, sizeof text,
		 "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x\n", b[0], b[1],
		 b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
		 b[15]);
	if (!write_file(OUR_BOOT_ID, text, 0444))
		return -1;
	if (!mounted && mount(OUR_BOOT_ID, BOOT_ID, NULL, MS_BIND, NULL) < 0)
		return -1;
	mounted = true;
	return 0;
}

static int name_machine(const char *hostname, const char *machine_id)
{
	char line[300];
	struct stat st;
	if (*hostname) {
		snprintf(line, sizeof line, "%s\n", hostname);
		if (sethostname(hostname, strlen(hostname)) < 0 ||
		    !write_file("/etc/hostname", line, 0644))
			return -1;
	}
	if (*machine_id) {
		snprintf(line, sizeof line, "%s\n", machine_id);
		if (!write_file("/etc/machine-id", line, 0444))
			return -1;
		if (lstat("/var/lib/dbus/machine-id", &st) == 0 && S_ISREG(st.st_mode) &&
		    !write_file("/var/lib/dbus/machine-id", line, 0444))
			return -1;
	}
	return 0;
}

static int ssh_keygen(void *unused)
{
	(void)unused;
	glob_t found;
	if (glob("/etc/ssh/ssh_host_*_key*", 0, NULL, &found) == 0)
		for (size_t i = 0; i < found.gl_pathc; i++)
			unlink(found.gl_pathv[i]);
	execl("/usr/bin/ssh-keygen", "ssh-keygen", "-A", (char *)NULL);
	if (errno == ENOENT)
		return 0;
	dprintf(2, "ssh-keygen: %s\n", strerror(errno));
	return 1;
}

static void finish_freshen(struct job *job)
{
	struct stream *s = job->stream;
	if (!s || job->status || job->timed_out) {
		job_finish_worker(job);
		return;
	}
	job->stream = NULL;
	identify(s);
}

static void begin_worker(struct stream *s, int (*work)(void *), void *argument, uint32_t timeout,
			 void (*finish)(struct job *))
{
	struct job *job = job_start(work, argument, false, timeout);
	if (!job) {
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
		return;
	}
	job->quiet = true;
	job->finish = finish;
	job_attach(job, s);
}

static const char *freshen(const struct timespec *clock, const uint8_t *entropy,
			   const char *hostname, const char *machine_id)
{
	if (thaw() < 0)
		return "cannot thaw the file system";
	if (clock_settime(CLOCK_REALTIME, clock) < 0)
		return "cannot set the clock";
	if (stir(entropy) < 0)
		return "cannot add entropy";
	if (new_boot_id() < 0)
		return "cannot renew the boot id";
	if (name_machine(hostname, machine_id) < 0)
		return "cannot name the machine";
	return NULL;
}

void freshen_request(struct stream *s, struct reader *in)
{
	struct timespec clock;
	char why[300];
	clock.tv_sec = (time_t)read_u64(in);
	clock.tv_nsec = (long)read_u32(in);
	const uint8_t *entropy = read_bytes(in, ENTROPY);
	char *hostname = read_text(in, 64), *machine_id = read_text(in, 32);
	uint32_t regenerate = read_u32(in), timeout = read_u32(in);
	if (in->bad || clock.tv_nsec > 999999999) {
		stream_result(s, C_BAD_REQUEST, "malformed freshen request", NULL);
	} else if (guest_only(s)) {
		const char *failed = freshen(&clock, entropy, hostname, machine_id);
		if (failed) {
			snprintf(why, sizeof why, "%s: %s", failed, strerror(errno));
			stream_result(s, C_SYSTEM, why, NULL);
		} else if (regenerate & SSH_HOST_KEYS && access("/etc/ssh", F_OK) == 0) {
			begin_worker(s, ssh_keygen, NULL, timeout, finish_freshen);
		} else {
			identify(s);
		}
	}
	free(hostname);
	free(machine_id);
}

void thaw_request(struct stream *s)
{
	if (!guest_only(s))
		return;
	if (thaw() < 0)
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
	else
		stream_result(s, C_OK, NULL, NULL);
}

static int freeze_work(void *unused)
{
	(void)unused;
	if (on_root(FIFREEZE) == 0 || errno == EBUSY) /* EBUSY: it is frozen already */
		return 0;
	dprintf(2, "cannot freeze the file system: %s\n", strerror(errno));
	return 1;
}

static int sync_work(void *drop_caches)
{
	sync();
	if (*(bool *)drop_caches && !write_file("/proc/sys/vm/drop_caches", "3\n", 0)) {
		dprintf(2, "cannot drop the caches: %s\n", strerror(errno));
		return 1;
	}
	return 0;
}

void worker_request(struct stream *s, struct reader *in, enum op op)
{
	uint32_t timeout = read_u32(in);
	bool drop_caches = op == OP_SYNC && read_u8(in);
	if (in->bad)
		stream_result(s, C_BAD_REQUEST, "malformed request", NULL);
	else if (guest_only(s))
		begin_worker(s, op == OP_FREEZE ? freeze_work : sync_work, &drop_caches, timeout,
			     job_finish_worker);
}

void shutdown_request(struct stream *s)
{
	if (!guest_only(s))
		return;
	stream_result(s, C_OK, NULL, NULL);
	port_flush(now_ms() + 1000);
	kill(-1, SIGTERM);
	usleep(200000);
	kill(-1, SIGKILL);
	thaw();
	sync();
	mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY, NULL);
	reboot(RB_POWER_OFF);
	reboot(RB_HALT_SYSTEM);
}
