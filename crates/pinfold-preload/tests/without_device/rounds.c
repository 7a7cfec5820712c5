/* Loads and unloads LIBRARY three times, and registers by it the last two. What is unmapped becomes something else's. */

#include "../check.h"

#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>

int main(int count, char **given)
{
	CHECK(count == 2);
	for (int round = 0; round < 3; round++) {
		void *handle = dlopen(given[1], RTLD_NOW | RTLD_LOCAL);
		int (*registers)(void);

		CHECK(handle);
		registers = (int (*)(void))dlsym(handle, "registers_in_between");
		CHECK(registers && (!round || !registers()) && !dlclose(handle));
		for (size_t pages = 1; pages <= 40; pages++)
			CHECK(mmap(NULL, pages << 12, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
	}
	return puts("done") < 0;
}
