/*
 * UCX's registration cache in the same loops as ours, by its default, thread-safe path: registration that does
 * nothing and no memory hooks (our monitor's check is one load in these runs), or with its hooks over a device.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucm/api/ucm.h>
#include <ucs/memory/rcache.h>

/* What the device does and has done; its layout is also written down in peer/ucx.rs. */
struct device {
    uint64_t pause; /* nanoseconds to sleep in every registration */
    /* Plain counters: one thread registers at a time wherever they are read. */
    uint64_t registered;
    uint64_t deregistered;
    /* A real device: registers, and gives back, what `owner` stands for; or NULL. 0 means done. */
    int (*add)(void *owner, uint64_t start, uint64_t bytes, uint32_t *handle);
    void (*end)(void *owner, uint64_t start, uint64_t bytes, uint32_t handle);
    void *owner;
};

/* A region with what a device gives, as its users declare it. */
struct registration {
    ucs_rcache_region_t super;
    uint32_t            handle;
};

static ucs_status_t reg(void *context, ucs_rcache_t *rcache, void *arg,
                        ucs_rcache_region_t *region, uint16_t flags)
{
    struct device *device = context;
    uint64_t nanoseconds  = __atomic_load_n(&device->pause, __ATOMIC_RELAXED);

    (void)rcache; (void)arg; (void)flags;
    if (nanoseconds != 0) {
        struct timespec pause = {nanoseconds / 1000000000, nanoseconds % 1000000000};
        nanosleep(&pause, NULL);
    }
    if (device->add == NULL) {
        ((struct registration *)region)->handle = 7;
    } else if (device->add(device->owner, region->super.start, region->super.end - region->super.start,
                           &((struct registration *)region)->handle) != 0) {
        return UCS_ERR_IO_ERROR;
    }
    ++device->registered;
    return UCS_OK;
}

static void dereg(void *context, ucs_rcache_t *rcache, ucs_rcache_region_t *region)
{
    struct device *device = context;

    (void)rcache;
    if (device->end != NULL) {
        device->end(device->owner, region->super.start, region->super.end - region->super.start,
                    ((struct registration *)region)->handle);
    }
    ++device->deregistered;
}

static void dump(void *context, ucs_rcache_t *rcache, ucs_rcache_region_t *region,
                 char *buffer, size_t max)
{
    (void)context; (void)rcache; (void)region;
    if (max != 0) {
        buffer[0] = '\0';
    }
}

static const ucs_rcache_ops_t ops = {reg, dereg, dump};

/* A cache over `device`, or NULL. Over a real one it follows the memory by UCX's hooks. */
ucs_rcache_t *peer_open(struct device *device, uint64_t max_regions, uint64_t max_bytes)
{
    ucs_rcache_params_t params = {
        .region_struct_size = sizeof(struct registration),
        .alignment          = UCS_RCACHE_MIN_ALIGNMENT,
        .max_alignment      = 4096,
        .ucm_events         = (device->add == NULL) ? 0 : UCM_EVENT_VM_UNMAPPED,
        .ucm_event_priority = 1000,
        .ops                = &ops,
        .context            = device,
        .flags              = UCS_RCACHE_FLAG_NO_PFN_CHECK,
        .max_regions        = max_regions,
        .max_size           = max_bytes,
        .max_unreleased     = SIZE_MAX,
    };
    ucs_rcache_t *rcache;

    return (ucs_rcache_create(&params, "peer", NULL, &rcache) == UCS_OK) ? rcache : NULL;
}

void peer_close(ucs_rcache_t *rcache)
{
    ucs_rcache_destroy(rcache);
}

static ucs_rcache_region_t *get(ucs_rcache_t *rcache, uint64_t address, uint64_t length)
{
    ucs_rcache_region_t *region;
    ucs_status_t status = ucs_rcache_get(rcache, (void *)address, length, PROT_READ | PROT_WRITE,
                                         NULL, &region);

    return (status == UCS_OK) ? region : NULL;
}

/* Reads the handle, as a user would. */
static void use(ucs_rcache_region_t *region)
{
    (void)*(volatile uint32_t *)&((struct registration *)region)->handle;
}

/* get + put of `length` bytes at each of `count` addresses; how many failed. */
uint64_t peer_get_put(ucs_rcache_t *rcache, const uint64_t *addresses, uint64_t count,
                      uint64_t length)
{
    uint64_t failed = 0;

    for (uint64_t i = 0; i < count; ++i) {
        ucs_rcache_region_t *region = get(rcache, addresses[i], length);
        if (region == NULL) {
            ++failed;
            continue;
        }
        use(region);
        ucs_rcache_region_put(rcache, region);
    }
    return failed;
}

/* The same, but each is put back only when `held` more have been taken. */
uint64_t peer_get_put_held(ucs_rcache_t *rcache, const uint64_t *addresses, uint64_t count,
                           uint64_t length, uint64_t held)
{
    ucs_rcache_region_t **ring = calloc(held, sizeof(*ring));
    uint64_t failed            = 0;

    if (ring == NULL) {
        return count;
    }
    for (uint64_t i = 0; i < count + held; ++i) {
        ucs_rcache_region_t **place = &ring[i % held];
        if (*place != NULL) {
            ucs_rcache_region_put(rcache, *place);
        }
        *place = (i < count) ? get(rcache, addresses[i], length) : NULL;
        if (*place != NULL) {
            use(*place);
        } else if (i < count) {
            ++failed;
        }
    }
    free(ring);
    return failed;
}

static void nothing(void *arg)
{
    (void)arg;
}

/* A miss and the destruction of its region at each of `count` addresses; how many failed. */
uint64_t peer_miss_destroy(ucs_rcache_t *rcache, const uint64_t *addresses, uint64_t count,
                           uint64_t length)
{
    uint64_t failed = 0;

    for (uint64_t i = 0; i < count; ++i) {
        ucs_rcache_region_t *region = get(rcache, addresses[i], length);
        if (region == NULL) {
            ++failed;
            continue;
        }
        use(region);
        ucs_rcache_region_invalidate(rcache, region, nothing, NULL);
        ucs_rcache_region_put(rcache, region);
    }
    return failed;
}

/* The same loop around nothing. */
void peer_walk(const uint64_t *addresses, uint64_t count)
{
    for (uint64_t i = 0; i < count; ++i) {
        __asm__ volatile("" : : "r"(addresses[i]) : "memory");
    }
}
