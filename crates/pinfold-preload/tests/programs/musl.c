/* A program of another C library. Its linker is given by name, because the machine that runs it has none. */

#include <stdio.h>
#include <stdlib.h>

int main(void)
{
	void *memory = malloc(1 << 20);

	printf("runs %d\n", memory != NULL);
	free(memory);
	return 0;
}
