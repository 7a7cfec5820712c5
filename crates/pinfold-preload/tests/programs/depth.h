/* How many bytes of stack a call takes: the stack below is painted, and what was painted over counts. */

#ifndef DEPTH_H
#define DEPTH_H

#include <stddef.h>
#include <stdint.h>

enum { DEEPEST = 96 << 10, NEAREST = 256 };

/* The bytes from this function's frame down to the deepest that `call` wrote, NEAREST at least. Call it on a stack that
 * has DEEPEST left, and once before: the first call of a function is the dynamic linker's. */
__attribute__((noinline)) static size_t depth_of(void (*call)(void))
{
	volatile unsigned char *frame = __builtin_frame_address(0), *byte;
	int round;

	for (round = 0; round < 2; round++) {
		for (byte = frame - DEEPEST; byte < frame - NEAREST; byte++)
			*byte = 0xa5;
		call();
	}
	for (byte = frame - DEEPEST; byte < frame - NEAREST && *byte == 0xa5; byte++)
		;
	return frame - byte;
}

#endif
