/* What makes a restored machine its own: clock, entropy, names; and freezing before a checkpoint. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
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

enum { ENTROPY = 64, SSH_HOST_KEYS = 1 };

static bool frozen;          /* the root file system may be frozen */
static int random_device = -1;

static bool guest_only(struct stream *s)
{
	if (!is_guest)
		stream_result(s, C_NOT_A_GUEST, "only the agent of a guest does this", NULL);
	return is_guest;
}

/* What is not given is read, as any program of the guest would. */
static void identify(struct stream *s, const char *machine_id, const char *boot_id)
{
	struct result out = { 0 };
	struct timespec t;
	char line[128];
	uint8_t random[32];
	if (!machine_id) {
		read_line("/etc/machine-id", line, sizeof line);
		machine_id = line;
	}
	add_text(&out, machine_id);
	if (!boot_id) {
		read_line("/proc/sys/kernel/random/boot_id", line, sizeof line);
		boot_id = line;
	}
	add_text(&out, boot_id);
	if (getrandom(random, sizeof random, GRND_NONBLOCK) == sizeof random) {
		add_bytes(&out, random, sizeof random);
		clock_gettime(CLOCK_REALTIME, &t);
		add_u64(&out, (uint64_t)t.tv_sec);
		add_u32(&out, (uint32_t)t.tv_nsec);
		stream_result(s, C_OK, NULL, &out);
	} else {
		stream_result(s, C_SYSTEM, "the kernel has no randomness yet", NULL);
	}
	result_free(&out);
}

void identity_request(struct stream *s)
{
	identify(s, NULL, NULL);
}

static int on_root(unsigned long what)
{
	int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int done = fd < 0 ? -1 : ioctl(fd, what, 0);
	if (fd >= 0)
		close(fd);
	return done;
}

static bool thaw(void)
{
	if (frozen && on_root(FITHAW) < 0 && errno != EINVAL) /* EINVAL: it was not frozen */
		return false;
	frozen = false;
	return true;
}

static bool stir(const uint8_t *bytes)
{
	struct {
		int bits, size;
		uint8_t bytes[ENTROPY];
	} pool = { ENTROPY * 8, ENTROPY, { 0 } };
	memcpy(pool.bytes, bytes, ENTROPY);
	if (random_device < 0)
		random_device = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
	bool done = random_device >= 0 && ioctl(random_device, RNDADDENTROPY, &pool) == 0 &&
		ioctl(random_device, RNDRESEEDCRNG) == 0;
	explicit_bzero(&pool, sizeof pool);
	return done;
}

void fixup_prepare(bool names)
{
	if (!is_guest)
		return;
	if (random_device < 0)
		random_device = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
	if (names && !identity_prepare(!frozen))
		say("identity files: %s", strerror(errno));
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
	identify(s, NULL, NULL);
}

static void begin_worker(struct stream *s, int (*work)(void *), void *argument, uint32_t timeout,
			 void (*finish)(struct job *))
{
	struct job *job = job_start(work, argument, false, NULL, timeout);
	if (!job) {
		stream_result(s, C_SYSTEM, strerror(errno), NULL);
		return;
	}
	job->quiet = true;
	job->finish = finish;
	job_attach(job, s);
}

/* A machine that gets no new name goes on being the one it was, and keeps its boot id too. */
static const char *take_names(const char *hostname, const char *machine_id, char boot_id[UUID_SIZE])
{
	*boot_id = 0;
	if (!*hostname && !*machine_id)
		return NULL;
	if (!identity_prepared() && !(thaw() && identity_prepare(true)))
		return "cannot mount the identity files";
	if (!new_uuid(boot_id) || !identity_set(ID_BOOT, boot_id))
		return "cannot renew the boot id";
	if (*hostname && (sethostname(hostname, strlen(hostname)) < 0 ||
			  !identity_set(ID_HOSTNAME, hostname)))
		return "cannot set the host name";
	if (*machine_id && !identity_set(ID_MACHINE, machine_id))
		return "cannot set the machine id";
	return NULL;
}

/* The clock first, it is the older the longer it waits; programs that wait for the disk last. */
static const char *freshen(const struct timespec *clock, const uint8_t *entropy,
			   const char *hostname, const char *machine_id, char boot_id[UUID_SIZE])
{
	if (clock_settime(CLOCK_REALTIME, clock) < 0)
		return "cannot set the clock";
	if (!stir(entropy))
		return "cannot add entropy";
	const char *failed = take_names(hostname, machine_id, boot_id);
	if (failed)
		return failed;
	return thaw() ? NULL : "cannot thaw the file system";
}

void freshen_request(struct stream *s, struct reader *in)
{
	struct timespec clock;
	char why[300], boot_id[UUID_SIZE], hostname[65], machine_id[33];
	clock.tv_sec = (time_t)read_u64(in);
	clock.tv_nsec = (long)read_u32(in);
	const uint8_t *entropy = read_bytes(in, ENTROPY);
	read_into(in, hostname, sizeof hostname);
	read_into(in, machine_id, sizeof machine_id);
	uint32_t regenerate = read_u32(in), timeout = read_u32(in);
	if (in->bad || clock.tv_nsec > 999999999) {
		stream_result(s, C_BAD_REQUEST, "malformed freshen request", NULL);
	} else if (guest_only(s)) {
		const char *failed = freshen(&clock, entropy, hostname, machine_id, boot_id);
		if (failed) {
			snprintf(why, sizeof why, "%s: %s", failed, strerror(errno));
			stream_result(s, C_SYSTEM, why, NULL);
		} else if (regenerate & SSH_HOST_KEYS && access("/etc/ssh", F_OK) == 0) {
			begin_worker(s, ssh_keygen, NULL, timeout, finish_freshen);
		} else {
			identify(s, *machine_id ? machine_id : NULL, *boot_id ? boot_id : NULL);
		}
	}
}

void thaw_request(struct stream *s)
{
	if (!guest_only(s))
		return;
	frozen = true; /* whoever froze it */
	if (!thaw())
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

void worker_start(struct stream *s, int (*work)(void *), void *argument, uint32_t timeout)
{
	begin_worker(s, work, argument, timeout, job_finish_worker);
}

void worker_request(struct stream *s, struct reader *in, enum op op)
{
	uint32_t timeout = read_u32(in);
	bool drop_caches = op == OP_SYNC && read_u8(in);
	if (in->bad) {
		stream_result(s, C_BAD_REQUEST, "malformed request", NULL);
	} else if (guest_only(s)) {
		frozen |= op == OP_FREEZE;
		begin_worker(s, op == OP_FREEZE ? freeze_work : sync_work, &drop_caches, timeout,
			     job_finish_worker);
	}
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
