/* A legal program of libfabric's that moves its memory between messages, and checks every byte that arrives.
 *
 * usage: fabric ADDRESS MESSAGES BYTES REUSE SEED
 *
 * Both ends of a connection through the device of ADDRESS are in this process. Before a message, a buffer either stays
 * as it is (in REUSE of 100 messages), or its pages are replaced behind the same address: mapped over or discarded, by
 * the C library or by instructions of the kernel that no library sees (`syscall`). Each message is registered for itself,
 * as libfabric's interface wants it, so whether a registration is an earlier one is the provider's to say.
 *
 * Prints one line: {"messages":N,"wrong":N,"found":N}; the last counts registrations with the key of the buffer's last
 * one. The exit status is 0 also if bytes are wrong: the caller judges. Everything follows from SEED. */

#define _GNU_SOURCE
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BUFFERS = 3, PAGE = 4096, PATIENCE = 30000 };

static size_t bytes;

static void must(int status, const char *what)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", what, fi_strerror(-status));
        exit(3);
    }
}

/* splitmix64 */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static unsigned char *map(void *at, int flags)
{
    void *got = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    must(got == MAP_FAILED ? -FI_ENOMEM : 0, "mmap");
    return got;
}

static void replace(unsigned char *at, unsigned route)
{
    switch (route) {
    case 0:
        map(at, MAP_FIXED);
        break;
    case 1:
        madvise(at, bytes, MADV_DONTNEED);
        break;
    case 2:
        syscall(SYS_mmap, at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0L);
        break;
    default:
        syscall(SYS_madvise, at, bytes, MADV_DONTNEED);
    }
}

static void fill(unsigned char *at, uint64_t key)
{
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = next(&key);
        memcpy(at + i, &word, sizeof word);
    }
}

static int holds(const unsigned char *at, uint64_t key)
{
    int wrong = 0;
    for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
        uint64_t word = next(&key);
        wrong |= memcmp(at + i, &word, sizeof word) != 0;
    }
    return !wrong;
}

static struct fi_info *info_of(const char *address, uint64_t flags)
{
    struct fi_info *hints = fi_allocinfo(), *info;
    hints->caps = FI_MSG;
    hints->ep_attr->type = FI_EP_MSG;
    hints->addr_format = FI_SOCKADDR_IN;
    hints->fabric_attr->prov_name = strdup("verbs");
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    must(fi_getinfo(FI_VERSION(1, 13), address, "7471", flags, hints, &info), "fi_getinfo");
    return info;
}

static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *events;
static struct fid_cq *completions;

static struct fid_ep *end_of(struct fi_info *info)
{
    struct fid_ep *end;
    must(fi_endpoint(domain, info, &end, NULL), "fi_endpoint");
    must(fi_ep_bind(end, &events->fid, 0), "fi_ep_bind");
    must(fi_ep_bind(end, &completions->fid, FI_SEND | FI_RECV), "fi_ep_bind");
    must(fi_enable(end), "fi_enable");
    return end;
}

/* The end that accepts. */
static struct fid_ep *connected(void)
{
    struct fid_ep *end = NULL;
    for (int times = 0; times < 2;) {
        struct {
            struct fi_eq_cm_entry cm;
            char more[256];
        } got;
        uint32_t event;
        ssize_t count = fi_eq_sread(events, &event, &got, sizeof got, PATIENCE, 0);
        must(count < 0 ? (int)count : 0, "fi_eq_sread");
        if (event == FI_CONNREQ) {
            end = end_of(got.cm.info);
            must(fi_accept(end, NULL, 0), "fi_accept");
        } else {
            must(event == FI_CONNECTED ? 0 : -FI_ECONNREFUSED, "the connection");
            times++;
        }
    }
    return end;
}

static void await_completion(void)
{
    struct fi_cq_entry entry;
    ssize_t count;
    while ((count = fi_cq_read(completions, &entry, 1)) == -FI_EAGAIN)
        sched_yield();
    if (count < 0) {
        struct fi_cq_err_entry error = { 0 };
        fi_cq_readerr(completions, &error, 0);
        must(-error.err, "a transfer");
    }
}

static struct fid_mr *registered(unsigned char *at, uint64_t access)
{
    struct fid_mr *region;
    must(fi_mr_reg(domain, at, bytes, access, 0, 0, 0, &region, NULL), "fi_mr_reg");
    return region;
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        fprintf(stderr, "usage: fabric ADDRESS MESSAGES BYTES REUSE SEED\n");
        return 2;
    }
    long messages = atol(argv[2]), wrong = 0, found = 0;
    bytes = (strtoul(argv[3], NULL, 10) + PAGE - 1) / PAGE * PAGE;
    unsigned reuse = (unsigned)atoi(argv[4]);
    uint64_t content = strtoull(argv[5], NULL, 10), draws = content * 2 + 1;

    struct fi_info *server = info_of(argv[1], FI_SOURCE), *client = info_of(argv[1], 0);
    struct fi_eq_attr of_events = { .wait_obj = FI_WAIT_UNSPEC };
    struct fi_cq_attr of_completions = { .format = FI_CQ_FORMAT_CONTEXT, .size = 16 };
    struct fid_pep *listener;
    must(fi_fabric(server->fabric_attr, &fabric, NULL), "fi_fabric");
    must(fi_eq_open(fabric, &of_events, &events, NULL), "fi_eq_open");
    must(fi_passive_ep(fabric, server, &listener, NULL), "fi_passive_ep");
    must(fi_pep_bind(listener, &events->fid, 0), "fi_pep_bind");
    must(fi_listen(listener), "fi_listen");
    must(fi_domain(fabric, client, &domain, NULL), "fi_domain");
    must(fi_cq_open(domain, &of_completions, &completions, NULL), "fi_cq_open");
    struct fid_ep *sends = end_of(client);
    must(fi_connect(sends, client->dest_addr, NULL, 0), "fi_connect");
    struct fid_ep *receives = connected();

    unsigned char *arrived = map(NULL, 0), *buffers[BUFFERS];
    struct fid_mr *arriving = registered(arrived, FI_RECV);
    uint64_t last[BUFFERS] = { 0 };
    for (int i = 0; i < BUFFERS; i++)
        buffers[i] = map(NULL, 0);
    for (long n = 0; n < messages; n++) {
        uint64_t key = next(&content);
        unsigned which = (unsigned)(next(&draws) % BUFFERS);
        unsigned char *at = buffers[which];
        if (next(&draws) % 100 >= reuse)
            replace(at, (unsigned)(next(&draws) % 4));
        fill(at, key);
        memset(arrived, 0, bytes);
        must((int)fi_recv(receives, arrived, bytes, fi_mr_desc(arriving), 0, NULL), "fi_recv");
        struct fid_mr *region = registered(at, FI_SEND);
        found += fi_mr_key(region) == last[which];
        last[which] = fi_mr_key(region);
        must((int)fi_send(sends, at, bytes, fi_mr_desc(region), 0, NULL), "fi_send");
        await_completion();
        await_completion();
        must(fi_close(&region->fid), "fi_close");
        wrong += !holds(arrived, key);
    }
    printf("{\"messages\":%ld,\"wrong\":%ld,\"found\":%ld}\n", messages, wrong, found);

    struct fid *all[] = { &arriving->fid, &sends->fid,    &receives->fid, &listener->fid,
                          &completions->fid, &domain->fid, &events->fid, &fabric->fid };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        must(fi_close(all[i]), "fi_close at the end");
    return 0;
}
