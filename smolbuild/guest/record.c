/* Exec ids and what became of them. One id names one execution for ever, so none is ever removed. */
#include "agent.h"

#include <stdlib.h>
#include <string.h>

static struct record **table;
static size_t table_size, table_used;

static size_t place(struct record **in, size_t size, const char *id)
{
	uint64_t hash = 14695981039346656037u; /* FNV-1a */
	for (const char *c = id; *c; c++)
		hash = (hash ^ (uint8_t)*c) * 1099511628211u;
	size_t at = hash & (size - 1);
	while (in[at] && strcmp(in[at]->id, id) != 0)
		at = (at + 1) & (size - 1);
	return at;
}

struct record *record_find(const char *id)
{
	return table_size ? table[place(table, table_size, id)] : NULL;
}

static void grow(void)
{
	size_t size = table_size ? table_size * 2 : 64;
	struct record **larger = must(calloc(size, sizeof *larger));
	for (size_t i = 0; i < table_size; i++)
		if (table[i])
			larger[place(larger, size, table[i]->id)] = table[i];
	free(table);
	table = larger;
	table_size = size;
}

struct record *record_add(const char *id)
{
	if (table_used >= MAX_RECORDS)
		return NULL;
	if ((table_used + 1) * 4 > table_size * 3)
		grow();
	struct record *record = must(calloc(1, sizeof *record));
	record->id = must(strdup(id));
	table[place(table, table_size, id)] = record;
	table_used++;
	return record;
}
