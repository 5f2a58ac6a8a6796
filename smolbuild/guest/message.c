/* DNS (RFC 1035) as far as a resolver of one's own needs it: one question in, one address out. */
#include "agent.h"

#include <string.h>

enum { DNS_HEADER = 12, CLASS_IN = 1, TTL = 60 };

static uint16_t load16(const uint8_t *p)
{
	return (uint16_t)(p[0] << 8 | p[1]);
}

static bool in_name(uint8_t c)
{
	return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

/* Returns where the name ends, 0 if it is malformed; other characters than a host's are refused. */
static size_t read_name(const uint8_t *m, size_t len, size_t at, char name[DNS_NAME])
{
	size_t out = 0;
	while (at < len && m[at]) {
		size_t label = m[at++];
		if (label > 63 || label > len - at || out + label + 2 > DNS_NAME)
			return 0;
		if (out)
			name[out++] = '.';
		for (; label; label--, at++) {
			uint8_t c = m[at] >= 'A' && m[at] <= 'Z' ? m[at] | 32 : m[at];
			if (!in_name(c))
				return 0;
			name[out++] = (char)c;
		}
	}
	name[out] = 0;
	return at < len ? at + 1 : 0;
}

/* False: to be answered with `code`, or not at all when that is negative. */
bool dns_parse(const uint8_t *m, size_t len, struct question *q, int *code)
{
	*q = (struct question){ 0 };
	*code = -1;
	if (len < DNS_HEADER || m[2] & 0x80) /* an answer is never answered */
		return false;
	*code = DNS_UNKNOWN;
	if (m[2] & 0x78)
		return false;
	*code = DNS_FORMAT;
	size_t at = load16(m + 4) == 1 ? read_name(m, len, DNS_HEADER, q->name) : 0;
	if (!at || len - at < 4)
		return false;
	q->type = load16(m + at);
	q->end = at + 4;
	*code = load16(m + at + 2) == CLASS_IN ? DNS_OK : DNS_REFUSED;
	return *code == DNS_OK;
}

size_t dns_answer(uint8_t *out, const uint8_t *m, const struct question *q, int code,
		  const uint32_t *address)
{
	const uint8_t record[] = { 0xc0, DNS_HEADER, 0, DNS_A, 0, CLASS_IN, 0, 0, 0, TTL, 0, 4 };
	size_t len = q->end ? q->end : DNS_HEADER;
	memcpy(out, m, len);
	out[2] = (uint8_t)(0x80 | (m[2] & 0x79)); /* an answer; opcode and "recursion desired" stay */
	out[3] = (uint8_t)(0x80 | code);          /* recursion available */
	memset(out + 4, 0, 8);
	out[5] = q->end != 0;
	if (!address)
		return len;
	out[7] = 1;
	memcpy(out + len, record, sizeof record);
	memcpy(out + len + sizeof record, address, 4);
	return len + sizeof record + 4;
}
