/* The boot: modules, the root disk, kernel file systems, network; then the port to the host. */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ROOT "/newroot"
#define DISK "/dev/vda"
#define PORT_NAME "smolbuild.agent"
enum { DEVICE_WAIT_MS = 20000 };

static void die(const char *what)
{
	say("cannot boot: %s: %s", what, strerror(errno));
	sync();
	reboot(RB_POWER_OFF);
	for (;;)
		pause();
}

bool write_file(const char *path, const char *text, mode_t mode)
{
	size_t len = strlen(text);
	int fd = open(path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK |
		      (mode ? O_CREAT | O_TRUNC : 0), mode);
	if (fd < 0)
		return false;
	bool done = write(fd, text, len) == (ssize_t)len;
	if (mode)
		done = fchmod(fd, mode) == 0 && done;
	return close(fd) == 0 && done;
}

static void mount_one(const char *type, const char *at, unsigned long flags, const char *options)
{
	mkdir(at, 0755);
	if (mount(type, at, type, flags, options) < 0 && errno != EBUSY)
		say("mount %s on %s: %s", type, at, strerror(errno));
}

static void load_modules(void)
{
	char path[512];
	FILE *list = fopen("/modules.list", "re");
	while (list && fgets(path, sizeof path, list)) {
		path[strcspn(path, "\n")] = 0;
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
			say("module %s: %s", path, strerror(errno));
		if (fd >= 0)
			close(fd);
	}
	if (list)
		fclose(list);
}

static void pause_ms(long ms)
{
	nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000 }, NULL);
}

static void mount_root(void)
{
	int64_t until = now_ms() + DEVICE_WAIT_MS;
	while (access(DISK, F_OK) < 0 && now_ms() < until)
		pause_ms(2);
	mkdir(ROOT, 0755);
	if (mount(DISK, ROOT, "ext4", MS_RELATIME, NULL) < 0)
		die("mount " DISK);
}

/* What the initramfs held is of no more use, and its memory would be part of every checkpoint. */
static void empty_initramfs(void)
{
	DIR *modules = opendir("/modules");
	struct dirent *entry;
	while (modules && (entry = readdir(modules)))
		if (*entry->d_name != '.')
			unlinkat(dirfd(modules), entry->d_name, 0);
	if (modules)
		closedir(modules);
	rmdir("/modules");
	unlink("/modules.list");
	unlink("/init");
}

static void switch_root(void)
{
	mkdir(ROOT "/dev", 0755);
	if (mount("/dev", ROOT "/dev", NULL, MS_MOVE, NULL) < 0)
		die("move /dev");
	empty_initramfs();
	if (chdir(ROOT) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 ||
	    chdir("/") < 0)
		die("switch root");
}

static void mount_kernel(void)
{
	mount_one("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_one("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_one("cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_one("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666");
	mount_one("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
	mount_one("mqueue", "/dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_one("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=0755,size=25%");
	mkdir("/run/lock", 01777);
	chmod("/run/lock", 01777);
	mkdir("/run/smolbuild", 0755);
	mkdir("/tmp", 01777);
	if (symlink("/proc/self/fd", "/dev/fd") < 0 || symlink("/proc/self/fd/0", "/dev/stdin") < 0 ||
	    symlink("/proc/self/fd/1", "/dev/stdout") < 0 ||
	    symlink("/proc/self/fd/2", "/dev/stderr") < 0)
		say("links in /dev: %s", strerror(errno));
}

/* There is no udev: sysfs tells which port has our name, devtmpfs made its node. */
static int find_port(void)
{
	char path[300], name[64];
	DIR *ports = opendir("/sys/class/virtio-ports");
	struct dirent *entry;
	int found = -1;
	while (ports && found < 0 && (entry = readdir(ports))) {
		if (*entry->d_name == '.')
			continue;
		snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		ssize_t n = fd < 0 ? 0 : read(fd, name, sizeof name - 1);
		if (fd >= 0)
			close(fd);
		name[n > 0 ? n : 0] = 0;
		name[strcspn(name, "\n")] = 0;
		snprintf(path, sizeof path, "/dev/%s", entry->d_name);
		if (strcmp(name, PORT_NAME) == 0)
			found = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
	}
	if (ports)
		closedir(ports);
	return found;
}

/* What programs expect of any machine, and images for containers leave to their runtime. */
static void missing_files(void)
{
	struct stat st;
	if (access("/etc/machine-id", F_OK) < 0)
		write_file("/etc/machine-id", "", 0444);
	if (access("/etc/hostname", F_OK) < 0)
		write_file("/etc/hostname", "", 0644);
	if (stat("/etc/hosts", &st) < 0 || (S_ISREG(st.st_mode) && st.st_size == 0))
		write_file("/etc/hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n", 0644);
}

static void host_name(void)
{
	char line[1024] = "", *name = NULL, *save;
	int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
	line[n > 0 ? n : 0] = 0;
	if (fd >= 0)
		close(fd);
	for (char *word = strtok_r(line, " \n", &save); word; word = strtok_r(NULL, " \n", &save))
		if (strncmp(word, "smolbuild.hostname=", 19) == 0)
			name = word + 19;
	if (name && *name && sethostname(name, strlen(name)) < 0)
		say("host name: %s", strerror(errno));
}

int boot(void)
{
	mount_one("devtmpfs", "/dev", MS_NOSUID, "mode=0755");
	fill_descriptors();
	load_modules();
	mount_root();
	switch_root();
	mount_kernel();
	mkdir("/etc", 0755);
	missing_files();
	host_name();
	network();
	reboot(RB_DISABLE_CAD);
	int64_t until = now_ms() + DEVICE_WAIT_MS;
	int port;
	while ((port = find_port()) < 0 && now_ms() < until)
		pause_ms(2);
	if (port < 0)
		die("no virtio-serial port " PORT_NAME);
	return port;
}
