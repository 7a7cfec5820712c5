/* A program that has libibverbs' functions itself and gives them to its libraries, as one that was linked with a static
 * libibverbs: says which one it has loaded. */

#include "../check.h"

#include <dlfcn.h>
#include <stdio.h>

#define OWN(name) int name(void); int name(void) { return 0; }

OWN(ibv_get_device_list)
OWN(ibv_reg_mr)
OWN(ibv_dereg_mr)
OWN(ibv_dealloc_pd)
OWN(ibv_close_device)

int main(void)
{
	return puts(dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD) ? "loaded" : "none") < 0;
}
