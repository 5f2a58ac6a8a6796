/*
 * Zeroes the free blocks of the root file system in given ranges of its disk, while it is frozen.
 *
 * FITRIM cannot do that: the host's disk format discards whole clusters of 64 KiB only, and a free
 * block of 4 KiB inside a used cluster would keep its bytes. So the block bitmaps are read from the
 * disk (through its page cache, where the kernel has them too) and each free run is zeroed by the
 * block layer. Layout: Linux, filesystems/ext4/ (super.rst, group_descr.rst).
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define DISK "/dev/vda"
#define BLKZEROOUT _IO(0x12, 127) /* linux/fs.h, which musl does not bring */
enum {
	SUPER = 1024, MAGIC_AT = 0x38, EXT4 = 0xEF53, META_BG = 0x10, BITS_64 = 0x80, BIGALLOC = 0x200,
	NEVER_USED = 2, MAX_BLOCK = 65536,
};

struct disk {
	int fd;
	uint32_t block_size, per_group, first, descriptor;
	uint64_t blocks;
	uint64_t group;      /* whose bitmap is there; UINT64_MAX: none */
	bool never_used;
	uint8_t bitmap[MAX_BLOCK];
};
struct ranges {
	const uint8_t *at; /* in the request: u64 offset, u64 length, each */
	uint32_t count;
};

static uint32_t get(const uint8_t *p, int bytes)
{
	uint32_t value = 0;
	for (int i = 0; i < bytes; i++)
		value |= (uint32_t)p[i] << (8 * i);
	return value;
}

static uint64_t get64(const uint8_t *p)
{
	return get(p, 4) | (uint64_t)get(p + 4, 4) << 32;
}

static bool fail(const char *why)
{
	dprintf(2, DISK ": %s\n", why);
	return false;
}

static bool read_at(const struct disk *d, void *data, size_t len, uint64_t offset)
{
	for (uint8_t *at = data; len;) {
		ssize_t n = pread(d->fd, at, len, (off_t)offset);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return fail(n ? strerror(errno) : "ends early");
		at += n;
		len -= (size_t)n;
		offset += (uint64_t)n;
	}
	return true;
}

static bool open_disk(struct disk *d)
{
	uint8_t super[SUPER];
	d->fd = open(DISK, O_RDWR | O_CLOEXEC);
	if (d->fd < 0)
		return fail(strerror(errno));
	if (!read_at(d, super, sizeof super, SUPER))
		return false;
	uint32_t incompatible = get(super + 0x60, 4), log = get(super + 0x18, 4);
	if (get(super + MAGIC_AT, 2) != EXT4 || incompatible & META_BG ||
	    get(super + 0x64, 4) & BIGALLOC || log > 6)
		return fail("no ext4 file system of the kind that we make");
	d->block_size = 1024u << log;
	d->blocks = get(super + 0x04, 4);
	d->first = get(super + 0x14, 4);
	d->per_group = get(super + 0x20, 4);
	d->descriptor = 32;
	if (incompatible & BITS_64) {
		d->blocks |= (uint64_t)get(super + 0x150, 4) << 32;
		d->descriptor = get(super + 0xFE, 2);
	}
	d->group = UINT64_MAX;
	if (!d->per_group || d->per_group > d->block_size * 8 || d->block_size > MAX_BLOCK ||
	    d->descriptor < 32 || d->descriptor > 1024)
		return fail("a damaged superblock");
	return true;
}

static bool load_group(struct disk *d, uint64_t group)
{
	uint8_t entry[64] = { 0 };
	if (group == d->group)
		return true;
	uint64_t table = ((uint64_t)d->first + 1) * d->block_size;
	if (!read_at(d, entry, d->descriptor < 64 ? d->descriptor : 64, table + group * d->descriptor))
		return false;
	uint64_t block = get(entry, 4);
	if (d->descriptor >= 64)
		block |= (uint64_t)get(entry + 0x20, 4) << 32;
	d->never_used = get(entry + 0x12, 2) & NEVER_USED;
	if (!block || block >= d->blocks)
		return fail("a damaged group");
	if (!d->never_used && !read_at(d, d->bitmap, d->block_size, block * d->block_size))
		return false;
	d->group = group;
	return true;
}

/* 1 free, 0 used, -1 failed. A group that was never used holds nothing to be zeroed. */
static int is_free(struct disk *d, uint64_t block)
{
	if (block < d->first || block >= d->blocks)
		return 0;
	uint64_t group = (block - d->first) / d->per_group, bit = (block - d->first) % d->per_group;
	if (!load_group(d, group))
		return -1;
	return !d->never_used && !(d->bitmap[bit >> 3] >> (bit & 7) & 1);
}

static bool zero_run(const struct disk *d, uint64_t first, uint64_t end)
{
	static const uint8_t zeros[65536];
	uint64_t range[2] = { first * d->block_size, (end - first) * d->block_size };
	if (ioctl(d->fd, BLKZEROOUT, range) == 0)
		return true;
	/* A page of the disk's own cache is busy: write through that cache then. */
	while (range[1]) {
		size_t part = range[1] < sizeof zeros ? (size_t)range[1] : sizeof zeros;
		ssize_t n = pwrite(d->fd, zeros, part, (off_t)range[0]);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return fail(strerror(errno));
		range[0] += (uint64_t)n;
		range[1] -= (uint64_t)n;
	}
	return true;
}

static bool zero_range(struct disk *d, uint64_t offset, uint64_t length)
{
	uint64_t block = (offset + d->block_size - 1) / d->block_size;
	uint64_t end = (offset + length) / d->block_size, run = UINT64_MAX;
	for (; block <= end; block++) {
		int state = block == end ? 0 : is_free(d, block);
		if (state < 0)
			return false;
		if (state && run == UINT64_MAX)
			run = block;
		if (!state && run != UINT64_MAX) {
			if (!zero_run(d, run, block))
				return false;
			run = UINT64_MAX;
		}
	}
	return true;
}

static int work(void *argument)
{
	const struct ranges *ranges = argument;
	static struct disk disk;
	if (!open_disk(&disk))
		return 1;
	for (uint32_t i = 0; i < ranges->count; i++) {
		uint64_t offset = get64(ranges->at + 16 * i), length = get64(ranges->at + 16 * i + 8);
		if (offset > INT64_MAX || length > INT64_MAX - offset ||
		    !zero_range(&disk, offset, length))
			return 1;
	}
	if (fsync(disk.fd) < 0) {
		fail(strerror(errno));
		return 1;
	}
	return 0;
}

void zero_free_request(struct stream *s, struct reader *in)
{
	static struct ranges ranges;
	uint32_t timeout = read_u32(in);
	ranges.count = read_u32(in);
	ranges.at = ranges.count > MAX_PAYLOAD / 16 ? NULL :
		read_bytes(in, (size_t)ranges.count * 16);
	if (in->bad || !ranges.at)
		stream_result(s, C_BAD_REQUEST, "malformed request", NULL);
	else if (!is_guest)
		stream_result(s, C_NOT_A_GUEST, "only the agent of a guest does this", NULL);
	else
		worker_start(s, work, &ranges, timeout);
}
