/* Frames on standard input (u16 length, bytes) are questions; each answer goes out the same way. */
#include "agent.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void)
{
	uint8_t size[2];
	const uint32_t address = 0x01020304;
	while (fread(size, 1, 2, stdin) == 2) {
		size_t len = (size_t)(size[0] << 8 | size[1]), out = 0;
		uint8_t *query = malloc(len ? len : 1), *answer = malloc(DNS_QUERY);
		struct question q;
		int code;
		if (fread(query, 1, len, stdin) != len)
			return 1;
		bool good = dns_parse(query, len, &q, &code);
		if (good || code >= 0)
			out = dns_answer(answer, query, &q, code, good ? &address : NULL);
		size_t name = strlen(q.name);
		putchar(good);
		putchar((int)(name >> 8));
		putchar((int)name);
		fwrite(q.name, 1, name, stdout);
		putchar((int)(out >> 8));
		putchar((int)out);
		fwrite(answer, 1, out, stdout);
		free(query);
		free(answer);
	}
	return 0;
}
