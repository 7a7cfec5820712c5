/* Stands between the preloaded library and libibverbs in the dynamic linker's order, as a profiler does: counts, and
 * hands on to the next. */

#include "verbs.h"
#include <dlfcn.h>

static int registered, deregistered;

int interposed_registrations(void);
int interposed_registrations(void)
{
	return registered;
}

int interposed_deregistrations(void);
int interposed_deregistrations(void)
{
	return deregistered;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	__typeof__(&ibv_reg_mr) next = (__typeof__(&ibv_reg_mr))dlsym(RTLD_NEXT, "ibv_reg_mr");

	registered++;
	return next(pd, addr, length, access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	__typeof__(&ibv_dereg_mr) next = (__typeof__(&ibv_dereg_mr))dlsym(RTLD_NEXT, "ibv_dereg_mr");

	deregistered++;
	return next(mr);
}

/* Of libfabric's functions one only. */
int fi_fabric(void *attributes, void **fabric, void *context);
int fi_fabric(void *attributes, void **fabric, void *context)
{
	__typeof__(&fi_fabric) next = (__typeof__(&fi_fabric))dlsym(RTLD_NEXT, "fi_fabric");

	return next(attributes, fabric, context);
}
