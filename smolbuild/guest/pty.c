/* Terminals: the pseudo terminal of an execution that a person sits at. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

static bool set_up(int ours, int theirs, const struct window *window)
{
	struct termios modes;
	if (tcgetattr(theirs, &modes) < 0)
		return false;
	modes.c_iflag |= IUTF8; /* erasing takes a whole character away */
	return tcsetattr(theirs, TCSANOW, &modes) == 0 && pty_resize(ours, window);
}

bool pty_open(struct job *job, int ends[3], const struct window *window)
{
	int ours = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
	if (ours < 0)
		return false;
	job->fd[1] = ours;
	/* By descriptor, not by name: what is mounted on /dev/pts does not matter. */
	if (unlockpt(ours) < 0)
		return false;
	ends[0] = ioctl(ours, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (ends[0] < 0 || !set_up(ours, ends[0], window))
		return false;
	job->fd[0] = fcntl(ours, F_DUPFD_CLOEXEC, 3);
	ends[1] = fcntl(ends[0], F_DUPFD_CLOEXEC, 3);
	ends[2] = fcntl(ends[0], F_DUPFD_CLOEXEC, 3);
	return job->fd[0] >= 0 && ends[1] >= 0 && ends[2] >= 0;
}

bool pty_resize(int ours, const struct window *window)
{
	struct winsize size = { .ws_row = (unsigned short)window->rows,
				.ws_col = (unsigned short)window->columns };
	return ioctl(ours, TIOCSWINSZ, &size) == 0;
}

/* Of the calling process, which leads a session: signals of its keys reach who is in front. */
bool pty_control(void)
{
	return ioctl(0, TIOCSCTTY, 0) == 0;
}
