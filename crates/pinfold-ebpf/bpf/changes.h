/* What the programs and a watched process share; the twin of src/layout.rs, where it is explained. */

typedef unsigned long long u64;
typedef long long s64;
typedef unsigned int u32;

#define ENTRIES 4096
#define RECORDS 128
#define TRIES 4
#define RECORD_SECONDS 2
#define BLOCK_SHIFT 21
#define BLOCKS 65536
#define BLOCKS_LOOKED_AT 8
#define WRITING (1ULL << 63)
#define CLOSED (1ULL << 63)
#define DONE(index) (2 * ((index) + 1))
#define BUSY(index) (DONE(index) + 1)

struct record {
	u64 owner, start, end, since;
};

struct entry {
	u64 stamp, start, end;
};

struct changes {
	u64 sequence, crowded, fence, reserved[5];
	struct record records[RECORDS];
	struct entry entries[ENTRIES];
};

struct wishes {
	u64 asleep, reserved[7];
	u32 blocks[BLOCKS / 32];
};

/* --- what the programs and their loader share (src/programs/object.rs) --- */

#define VIEWS_PER_PROCESS 2
#define FILTER_BITS 12

/* The value of `watched`: which views an address space has, each number plus one. */
struct views {
	u32 view[VIEWS_PER_PROCESS];
};

/* Where this kernel keeps what we read; written by the loader before the programs are verified, so
 * to the verifier these are constants. */
struct offsets {
	u64 gather_mm, vma_mm, task_mm, meta_seq;
	u64 unmap_start, unmap_end;
	u64 move_vma, move_old_address, move_old_end, move_new_address, move_length;
	u64 preemption;
};

/* What the program `whose` writes for each thread of a process. */
struct whose {
	u64 mm;
	u64 preemption;
};
