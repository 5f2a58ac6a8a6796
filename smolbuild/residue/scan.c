/*
 * Finds byte strings in parts of files. Everything it needs to know comes over standard input (the
 * strings may be secrets: never arguments or files); what it found goes to standard output.
 *
 * Input, all numbers little-endian:
 *   u32 count of needles, for each: u32 length, u32 run, 32 bytes of a set of bytes, the needle
 *   u32 count of files, for each: u32 length, path
 *   u32 count of segments, for each: u32 file, u32 joined, u64 offset, u64 length
 * A needle counts when at least `run` bytes of its set follow it. Segments are searched in their
 * order; one that is joined goes on where the one before it ended, so a needle may lie across both.
 * Beyond a file's end there are zeros.
 *
 * Output: for each find u32 needle, u64 position, counted over the segments as if they were one
 * file; at last u32 ~0, u64 bytes searched. Nothing after it: the search is complete.
 *
 * The search: each needle is represented by its rarest four bytes (its window). The windows are in
 * eight buckets; for each position and each of the four bytes two 16-entry tables, by low and high
 * half of the byte, say which buckets it may belong to, so that a vector shuffle asks for 16 or 32
 * positions at once (the Teddy algorithm of Hyperscan). What passes is looked up by a hash of the
 * four bytes, then compared. A needle of three bytes has a bucket of its own and no fourth byte.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
	BUFFER = 1 << 20,
	PAD = 64,               /* vectors read so far beyond the end */
	WINDOW = 4,
	BUCKETS = 8,
	SHORT_BUCKET = 7,
	HASH_BITS = 12,
	MAX_NEEDLES = 1 << 16,
	MAX_NEEDLE = 1 << 16,
	MAX_FILES = 4096,
	MAX_FINDS = 1 << 20,
	OUT = 4096,
};

struct needle {
	const uint8_t *data;
	const uint8_t *set;
	uint32_t len, run, at; /* at: where the window begins */
	uint32_t window;
	int32_t next;          /* of the same hash */
};
struct segment {
	uint32_t file, joined;
	uint64_t offset, length;
};

static uint8_t *input;
static size_t input_len, input_at;

static struct needle *needles;
static uint32_t needle_count, longest;
static int *files;
static uint32_t file_count;

static uint8_t low[WINDOW][16], high[WINDOW][16];
static int32_t by_hash[1 << HASH_BITS];
static int32_t short_needles = -1;
static uint8_t pairs[65536 / 8]; /* first two bytes of windows, for machines without vectors */

static uint8_t out[OUT * 12];
static size_t out_len;
static uint64_t finds;

static void die(const char *what)
{
	fprintf(stderr, "residue scan: %s\n", what);
	_exit(1);
}

static const uint8_t *take(size_t len)
{
	if (len > input_len - input_at)
		die("the request is cut short");
	input_at += len;
	return input + input_at - len;
}

static uint32_t load32(const uint8_t *p)
{
	uint32_t v;
	memcpy(&v, p, 4);
	return v;
}

static uint32_t take32(void)
{
	return load32(take(4));
}

static uint64_t take64(void)
{
	uint64_t first = take32();
	return first | (uint64_t)take32() << 32;
}

static void read_input(void)
{
	size_t size = 1 << 16;
	ssize_t n;
	input = malloc(size);
	while (input && (n = read(0, input + input_len, size - input_len)) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			die("cannot read the request");
		input_len += (size_t)n;
		if (input_len == size) {
			uint8_t *larger = malloc(size * 2);
			if (!larger)
				die("out of memory");
			memcpy(larger, input, size);
			explicit_bzero(input, size);
			free(input);
			input = larger;
			size *= 2;
		}
	}
	if (!input)
		die("out of memory");
}

static void flush(void)
{
	size_t at = 0;
	while (at < out_len) {
		ssize_t n = write(1, out + at, out_len - at);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			die("cannot write what was found");
		at += (size_t)n;
	}
	out_len = 0;
}

static void tell(uint32_t needle, uint64_t position)
{
	if (out_len == sizeof out)
		flush();
	memcpy(out + out_len, &needle, 4);
	memcpy(out + out_len + 4, &position, 8);
	out_len += 12;
}

/* How much a byte tells: what memory is full of tells little. */
static int weight(uint8_t byte)
{
	if (byte == 0 || byte == 0xff)
		return 0;
	if (byte == ' ' || byte == '\n' || byte == '/' || byte == '-')
		return 1;
	if (byte >= 'a' && byte <= 'z')
		return strchr("etaoinsrlcd", byte) ? 2 : 4;
	if (byte >= '0' && byte <= '9')
		return 4;
	return byte < 32 ? 3 : 5;
}

static void choose_window(struct needle *n)
{
	int best = -1;
	n->at = 0;
	for (uint32_t at = 0; at + WINDOW <= n->len; at++) {
		int sum = 0;
		for (int i = 0; i < WINDOW; i++) {
			bool again = false;
			for (int j = 0; j < i; j++)
				again |= n->data[at + j] == n->data[at + i];
			sum += again ? 0 : weight(n->data[at + i]);
		}
		if (sum > best) {
			best = sum;
			n->at = at;
		}
	}
}

static uint32_t hash(uint32_t window)
{
	return window * 2654435761u >> (32 - HASH_BITS);
}

static void add_window(uint32_t index, int bucket)
{
	struct needle *n = &needles[index];
	const uint8_t *window = n->data + n->at;
	uint8_t bit = (uint8_t)(1 << bucket);
	for (int i = 0; i < WINDOW; i++)
		if (n->len > (uint32_t)i) {
			low[i][window[i] & 15] |= bit;
			high[i][window[i] >> 4] |= bit;
		} else {
			for (int j = 0; j < 16; j++) {
				low[i][j] |= bit;
				high[i][j] |= bit;
			}
		}
	uint32_t pair = window[0] | (uint32_t)window[1] << 8;
	pairs[pair >> 3] |= (uint8_t)(1 << (pair & 7));
	if (n->len < WINDOW) {
		n->next = short_needles;
		short_needles = (int32_t)index;
	} else {
		n->window = load32(window);
		n->next = by_hash[hash(n->window)];
		by_hash[hash(n->window)] = (int32_t)index;
	}
}

static int by_window(const void *a, const void *b)
{
	const struct needle *x = &needles[*(const uint32_t *)a], *y = &needles[*(const uint32_t *)b];
	return memcmp(x->data + x->at, y->data + y->at, WINDOW);
}

/* Windows that are alike share a bucket: so each bucket lets fewer other bytes pass. */
static void make_tables(void)
{
	uint32_t *order = malloc((needle_count + 1) * sizeof *order), count = 0;
	if (!order)
		die("out of memory");
	memset(by_hash, 0xff, sizeof by_hash);
	for (uint32_t i = 0; i < needle_count; i++) {
		choose_window(&needles[i]);
		if (needles[i].len < WINDOW)
			add_window(i, SHORT_BUCKET);
		else
			order[count++] = i;
	}
	qsort(order, count, sizeof *order, by_window);
	int buckets = short_needles < 0 ? BUCKETS : SHORT_BUCKET;
	for (uint32_t i = 0; i < count; i++)
		add_window(order[i], (int)((uint64_t)i * (uint32_t)buckets / count));
	free(order);
}

static void read_needles(void)
{
	needle_count = take32();
	if (needle_count > MAX_NEEDLES)
		die("too many needles");
	needles = calloc(needle_count + 1, sizeof *needles);
	if (!needles)
		die("out of memory");
	for (uint32_t i = 0; i < needle_count; i++) {
		struct needle *n = &needles[i];
		n->len = take32();
		n->run = take32();
		n->set = take(32);
		if (n->len < 3 || n->len > MAX_NEEDLE || n->run > MAX_NEEDLE)
			die("a needle is too short or too long");
		n->data = take(n->len);
		if (n->len + n->run > longest)
			longest = n->len + n->run;
	}
}

static void open_files(void)
{
	file_count = take32();
	if (file_count > MAX_FILES)
		die("too many files");
	files = calloc(file_count + 1, sizeof *files);
	if (!files)
		die("out of memory");
	for (uint32_t i = 0; i < file_count; i++) {
		uint32_t len = take32();
		char *path = strndup((const char *)take(len), len);
		files[i] = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
		if (files[i] < 0) {
			fprintf(stderr, "residue scan: %s: %s\n", path ? path : "?", strerror(errno));
			_exit(1);
		}
		free(path);
	}
}

/* What is being searched: `data` holds `len` bytes, of which the first `carry` were seen before. */
struct view {
	const uint8_t *data;
	size_t len, carry;
	uint64_t base; /* position of data[0] */
};

static void check(const struct view *v, size_t window, uint32_t index)
{
	const struct needle *n = &needles[index];
	if (window < n->at)
		return;
	size_t start = window - n->at, end = start + n->len + n->run;
	if (end > v->len || end <= v->carry || memcmp(v->data + start, n->data, n->len) != 0)
		return;
	for (size_t i = start + n->len; i < end; i++)
		if (!(n->set[v->data[i] >> 3] >> (v->data[i] & 7) & 1))
			return;
	if (finds++ < MAX_FINDS)
		tell(index, v->base + start);
}

static void candidate(const struct view *v, size_t at, uint8_t buckets)
{
	if (buckets & (1 << SHORT_BUCKET))
		for (int32_t i = short_needles; i >= 0; i = needles[i].next)
			if (memcmp(v->data + at, needles[i].data, needles[i].len) == 0)
				check(v, at, (uint32_t)i);
	uint32_t window = load32(v->data + at);
	for (int32_t i = by_hash[hash(window)]; i >= 0; i = needles[i].next)
		if (needles[i].window == window)
			check(v, at, (uint32_t)i);
}

static void search_plain(const struct view *v)
{
	for (size_t at = 0; at < v->len; at++) {
		uint32_t pair = v->data[at] | (uint32_t)v->data[at + 1] << 8;
		if (pairs[pair >> 3] >> (pair & 7) & 1) {
			uint8_t buckets = 0xff;
			for (int i = 0; i < WINDOW; i++)
				buckets &= low[i][v->data[at + i] & 15] & high[i][v->data[at + i] >> 4];
			if (buckets)
				candidate(v, at, buckets);
		}
	}
}

#if defined(__x86_64__)
__attribute__((target("ssse3"))) static void search_16(const struct view *v)
{
	const __m128i halves = _mm_set1_epi8(15);
	__m128i l[WINDOW], h[WINDOW];
	uint8_t lanes[16];
	for (int i = 0; i < WINDOW; i++) {
		l[i] = _mm_loadu_si128((const __m128i *)low[i]);
		h[i] = _mm_loadu_si128((const __m128i *)high[i]);
	}
	for (size_t at = 0; at < v->len; at += 16) {
		__m128i found = _mm_set1_epi8(-1);
		for (int i = 0; i < WINDOW; i++) {
			__m128i in = _mm_loadu_si128((const __m128i *)(v->data + at + i));
			__m128i a = _mm_shuffle_epi8(l[i], _mm_and_si128(in, halves));
			__m128i b = _mm_shuffle_epi8(h[i], _mm_and_si128(_mm_srli_epi16(in, 4), halves));
			found = _mm_and_si128(found, _mm_and_si128(a, b));
		}
		unsigned none = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(found, _mm_setzero_si128()));
		if (none == 0xffff)
			continue;
		_mm_storeu_si128((__m128i *)lanes, found);
		for (unsigned some = ~none & 0xffff; some; some &= some - 1) {
			int lane = __builtin_ctz(some);
			candidate(v, at + (size_t)lane, lanes[lane]);
		}
	}
}

__attribute__((target("avx2"))) static void search_32(const struct view *v)
{
	const __m256i halves = _mm256_set1_epi8(15);
	__m256i l[WINDOW], h[WINDOW];
	uint8_t lanes[32];
	for (int i = 0; i < WINDOW; i++) {
		l[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low[i]));
		h[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high[i]));
	}
	for (size_t at = 0; at < v->len; at += 32) {
		__m256i found = _mm256_set1_epi8(-1);
		for (int i = 0; i < WINDOW; i++) {
			__m256i in = _mm256_loadu_si256((const __m256i *)(v->data + at + i));
			__m256i a = _mm256_shuffle_epi8(l[i], _mm256_and_si256(in, halves));
			__m256i b = _mm256_shuffle_epi8(
				h[i], _mm256_and_si256(_mm256_srli_epi16(in, 4), halves));
			found = _mm256_and_si256(found, _mm256_and_si256(a, b));
		}
		unsigned none =
			(unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi8(found, _mm256_setzero_si256()));
		if (none == 0xffffffff)
			continue;
		_mm256_storeu_si256((__m256i *)lanes, found);
		for (unsigned some = ~none; some; some &= some - 1) {
			int lane = __builtin_ctz(some);
			candidate(v, at + (size_t)lane, lanes[lane]);
		}
	}
}
#endif

static void (*chosen(void))(const struct view *)
{
	const char *wanted = getenv("SMOLBUILD_SCAN_LANES"); /* for tests: 1, 16 or 32 */
	int lanes = wanted ? atoi(wanted) : 32;
#if defined(__x86_64__)
	__builtin_cpu_init();
	if (lanes >= 32 && __builtin_cpu_supports("avx2"))
		return search_32;
	if (lanes >= 16 && __builtin_cpu_supports("ssse3"))
		return search_16;
#endif
	(void)lanes;
	return search_plain;
}

static void read_at(int fd, uint8_t *data, size_t len, uint64_t offset)
{
	while (len) {
		ssize_t n = pread(fd, data, len, (off_t)offset);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			die(strerror(errno));
		if (n == 0) {
			memset(data, 0, len);
			return;
		}
		data += n;
		len -= (size_t)n;
		offset += (uint64_t)n;
	}
}

static uint64_t search_segments(void)
{
	void (*search)(const struct view *) = chosen();
	uint32_t count = take32();
	size_t keep = longest ? longest - 1 : 0, carry = 0;
	uint8_t *buffer = calloc(1, keep + BUFFER + PAD);
	uint64_t position = 0;
	if (!buffer)
		die("out of memory");
	for (uint32_t i = 0; i < count; i++) {
		struct segment s = { .file = take32(), .joined = take32() };
		s.offset = take64();
		s.length = take64();
		if (s.file >= file_count)
			die("a segment names no file");
		if (!s.joined)
			carry = 0;
		while (s.length) {
			size_t part = s.length < BUFFER ? (size_t)s.length : BUFFER, whole = carry + part;
			read_at(files[s.file], buffer + carry, part, s.offset);
			memset(buffer + whole, 0, PAD);
			search(&(struct view){ buffer, whole, carry, position - carry });
			carry = whole < keep ? whole : keep;
			memmove(buffer, buffer + whole - carry, carry);
			position += part;
			s.offset += part;
			s.length -= part;
		}
	}
	return position;
}

int main(void)
{
	setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
	prctl(PR_SET_DUMPABLE, 0);
	read_input();
	read_needles();
	open_files();
	make_tables();
	uint64_t searched = search_segments();
	tell(~0U, searched);
	flush();
	explicit_bzero(input, input_len);
	return 0;
}
