/* Requests: which part of the agent answers which operation. */
#include "agent.h"

#include <stdlib.h>

void epoch_began(void)
{
	tunnels_pause(false);
}

static void quiesce(struct stream *s, struct reader *in)
{
	bool names = read_u8(in);
	if (in->bad) {
		stream_result(s, C_BAD_REQUEST, "malformed quiesce request", NULL);
		return;
	}
	tunnels_reset();
	if (stream_count() > 1) {
		stream_result(s, C_BUSY, "requests are still open", NULL);
		return;
	}
	tunnels_pause(true);
	fixup_prepare(names);
	stream_result(s, C_OK, NULL, NULL);
}

void request(struct stream *s, struct reader *in)
{
	uint8_t op = read_u8(in);
	switch (op) {
	case OP_PING:
		stream_result(s, C_OK, NULL, NULL);
		return;
	case OP_EXEC:
		exec_request(s, in);
		return;
	case OP_KILL:
		kill_request(s, in);
		return;
	case OP_STATUS:
		status_request(s, in);
		return;
	case OP_OUTPUT:
		output_request(s, in);
		return;
	case OP_PUT:
	case OP_GET:
		copy_request(s, in, op == OP_PUT);
		return;
	case OP_PROBE:
		probe_request(s, in);
		return;
	case OP_FRESHEN:
		freshen_request(s, in);
		return;
	case OP_IDENTITY:
		identity_request(s);
		return;
	case OP_THAW:
		thaw_request(s);
		return;
	case OP_FREEZE:
	case OP_SYNC:
		worker_request(s, in, op);
		return;
	case OP_QUIESCE:
		quiesce(s, in);
		return;
	case OP_TUNNELS:
		tunnels_request(s, in);
		return;
	case OP_RESIZE:
		resize_request(s, in);
		return;
	case OP_SECRETS:
		secrets_request(s, in);
		return;
	case OP_SURVEY:
		survey_request(s, in);
		return;
	case OP_ZERO_FREE:
		zero_free_request(s, in);
		return;
	case OP_SHUTDOWN:
		shutdown_request(s);
		return;
	default:
		stream_result(s, C_BAD_REQUEST, "unknown operation", NULL);
	}
}
