/* Stands in for libibverbs where there is no device: registrations are structures of the heap, and nothing is
 * pinned. An open device is a descriptor; what it stands for at the moment has numbers of registrations, which begin
 * at 1 in each device that is opened. With PRESENT it has what came later. With REUSES a number that is free, and the key
 * that goes with it, is the next registration's, and a domain is in use as long as it has registrations, of whatever
 * process. */

#include "verbs.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct device {
	uint32_t last;
	size_t *bytes;
};

/* What a handle is the first part of. */
struct registration {
	struct ibv_mr mr;
	int access;
};

static struct device devices[256];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t pinned, limit = (size_t)1 << 40;

void verbs_limit(size_t bytes)
{
	limit = bytes;
}

int verbs_has(int device, uint32_t handle)
{
	return devices[device].bytes[handle] != 0;
}

static struct ibv_mr *library_s;

void verbs_has_until_the_end(struct ibv_mr *mr)
{
	library_s = mr;
}

/* Behind the destructors of what stands before it. */
__attribute__((destructor)) static void give_back(void)
{
	if (library_s)
		ibv_dereg_mr(library_s);
}

int verbs_rights(const struct ibv_mr *mr)
{
	return ((const struct registration *)mr)->access;
}

/* The next registration's. */
static uint32_t number(const struct device *device)
{
	uint32_t handle = device->last + 1;

#ifdef REUSES
	for (handle = 1; handle <= device->last && device->bytes[handle]; handle++)
		;
#endif
	return handle;
}

static uint32_t begin(struct device *device, size_t bytes)
{
	uint32_t handle = 0;

	pthread_mutex_lock(&lock);
	if (pinned + bytes > limit) {
		errno = ENOMEM;
	} else {
		bytes += !bytes; /* none is a registration, too */
		pinned += bytes;
		handle = number(device);
		if (handle > device->last) {
			device->last = handle;
			device->bytes = realloc(device->bytes, (handle + 1) * sizeof(*device->bytes));
		}
		device->bytes[handle] = bytes;
	}
	pthread_mutex_unlock(&lock);
	return handle;
}

static int end(struct device *device, uint32_t handle)
{
	int is_there;

	pthread_mutex_lock(&lock);
	is_there = handle <= device->last && device->bytes[handle];
	if (is_there) {
		pinned -= device->bytes[handle];
		device->bytes[handle] = 0;
	}
	pthread_mutex_unlock(&lock);
	return is_there ? 0 : (errno = ENOENT);
}

struct ibv_context *ibv_open_device(void *device)
{
	struct ibv_context *context = calloc(1, 4096);

	context->device = device;
	context->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	context->async_fd = -1;
	memset(&devices[context->cmd_fd], 0, sizeof(*devices));
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	close(context->cmd_fd);
	free(context);
	return 0;
}

#ifdef REUSES
/* How many registrations each domain has, by its number. */
static int *users;

__attribute__((constructor)) static void share_users(void)
{
	users = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static int used(const struct ibv_pd *pd, int more)
{
	return __atomic_add_fetch(&users[pd->handle], more, __ATOMIC_RELAXED);
}

struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	*pd = (struct ibv_pd){ context, handle };
	return pd;
}

void ibv_unimport_pd(struct ibv_pd *pd)
{
	free(pd);
}
#else
static int used(const struct ibv_pd *pd, int more)
{
	(void)pd, (void)more;
	return 0;
}
#endif

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	static uint32_t last;
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	*pd = (struct ibv_pd){ context, last++ };
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	if (used(pd, 0))
		return errno = EBUSY;
	free(pd);
	return 0;
}

static uint32_t key_of(uint32_t handle)
{
#ifndef REUSES
	static uint32_t last;

	handle = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
#endif
	return handle << 8;
}

static struct ibv_mr *made(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	uint32_t handle = begin(&devices[pd->context->cmd_fd], length);
	uint32_t key = key_of(handle);
	/* What was freed last comes first. */
	struct registration *mr = handle ? malloc(sizeof(*mr)) : NULL;

	if (mr) {
		*mr = (struct registration){ { pd->context, pd, addr, length, handle, key, key }, access };
		used(pd, 1);
	}
	return mr ? &mr->mr : NULL;
}

#ifdef PRESENT
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	(void)iova;
	return made(pd, addr, length, (int)access);
}

/* As later versions do it: one name goes to the other by the dynamic linker. */
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
}

struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct ibv_mr_init_attr *attributes)
{
	return made(pd, attributes->addr, attributes->length, attributes->access);
}

struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, void *buf, void *addr, size_t length, int access)
{
	struct ibv_mr_init_attr attributes = { length, access, 0, 0, addr };

	(void)buf;
	return ibv_reg_mr_ex(pd, &attributes);
}
#else
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return made(pd, addr, length, access);
}
#endif

int ibv_dereg_mr(struct ibv_mr *mr)
{
	int status = end(&devices[mr->context->cmd_fd], mr->handle);

	if (!status) {
		used(mr->pd, -1);
		free(mr);
	}
	return status;
}

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct device *device = &devices[mr->context->cmd_fd];
	uint32_t handle = begin(device, length);

	(void)flags, (void)pd, (void)access;
	if (!handle)
		return -4; /* IBV_REREG_MR_ERR_CMD */
	end(device, mr->handle);
	mr->addr = addr, mr->length = length, mr->handle = handle;
	return 0;
}

#ifdef PRESENT
int ibv_fork_init(void)
{
	return 0;
}
#endif

/* Pages are kept from forked children where that was asked for as the program started. */
static int is_fork_safe;

__attribute__((constructor)) static void note_start(void)
{
	is_fork_safe = getenv("IBV_FORK_SAFE") != NULL;
}

static int kept_from_children(void *base, size_t size, int advice)
{
	return is_fork_safe ? madvise(base, size, advice) : 0;
}

int ibv_dontfork_range(void *base, size_t size);
int ibv_dontfork_range(void *base, size_t size)
{
	return kept_from_children(base, size, MADV_DONTFORK);
}

int ibv_dofork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size)
{
	return kept_from_children(base, size, MADV_DOFORK);
}

/* What must be there by name. */
#define ABSENT(name)                                                                               \
	int name(void);                                                                            \
	int name(void)                                                                             \
	{                                                                                          \
		errno = ENOSYS;                                                                    \
		return -1;                                                                         \
	}

ABSENT(ibv_get_device_list)
ABSENT(ibv_free_device_list)
ABSENT(ibv_get_device_name)
ABSENT(ibv_query_device)
ABSENT(ibv_query_port)
ABSENT(ibv_query_gid)
ABSENT(ibv_create_cq)
ABSENT(ibv_destroy_cq)
ABSENT(ibv_create_comp_channel)
ABSENT(ibv_destroy_comp_channel)
ABSENT(ibv_get_cq_event)
ABSENT(ibv_ack_cq_events)
ABSENT(ibv_create_qp)
ABSENT(ibv_modify_qp)
ABSENT(ibv_query_qp)
ABSENT(ibv_destroy_qp)
ABSENT(ibv_wc_status_str)
