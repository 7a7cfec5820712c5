/*
 * A library next to the hooks. As it is, one that calls madvise, also from its initialiser.
 *
 * FIRST: one that has a madvise of its own, which makes the call itself.
 * FORWARDS: one that has a madvise of its own, which hands on to the next.
 */

#include <dlfcn.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { GUARD_INSTALL = 102 };

#if defined(FIRST)
int madvise(void *start, size_t length, int advice)
{
	return syscall(SYS_madvise, start, length, advice) ? -1 : 0;
}

/* Its own way past every hook, as in libraries that are linked with a C library of their own. */
long syscall(long number, ...)
{
	(void)number;
	return 0;
}
#elif defined(FORWARDS)
int madvise(void *start, size_t length, int advice)
{
	static int (*next)(void *, size_t, int);

	if (!next)
		next = (int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "madvise");
	return next(start, length, advice);
}
#else
__attribute__((visibility("default"))) void guard(void *start, size_t length)
{
	madvise(start, length, GUARD_INSTALL);
}

__attribute__((constructor)) static void at_start(void)
{
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	guard(page, 4096);
}
#endif
