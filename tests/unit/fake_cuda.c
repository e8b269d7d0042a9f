// The calls of libcuda.so.1 for virtual and for shared memory, on main memory, as strict as the driver about their order:
// reserved ranges cannot be touched, physical memory is a file that is mapped into them, and the last to hold it frees it.
// Shared memory is a file, too, which other processes open by the number of its owner. A copy arrives when it is waited for.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, UNIT = 1 << 16, MOST = 4096 };

typedef unsigned long long u64;
typedef struct { int type, id; } Location;
typedef struct { int type, handle_types; Location location; void *metadata; unsigned char flags[8]; } Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { int file, holders; size_t size; } Physical;
typedef struct { u64 address; size_t size; int physical; } Mapping;
typedef struct { union { struct { int process, file; size_t size; } of; char reserved[64]; }; } Handle;
typedef struct { u64 address; Handle handle; int opened; } Shared;

static Physical physicals[MOST];
static Mapping mappings[MOST], ranges[MOST];  // free when their size is 0
static Shared shared[MOST];  // free when their address is 0
static struct { void *target, *data; size_t size; } queue[MOST];
static int queued;
static size_t total = (size_t)1 << 28;
static const char *fails = "";
static int code, countdown;
static __thread int current;

// What tests ask and set.
void fake_make_current(void) { current = 1; }
void fake_total(size_t bytes) { total = bytes; }
void fake_fail(const char *name, int with, int after) { fails = name, code = with, countdown = after; }
int fake_ranges(void) { int n = 0; for (int i = 0; i < MOST; i++) n += ranges[i].size > 0; return n; }
int fake_mappings(void) { int n = 0; for (int i = 0; i < MOST; i++) n += mappings[i].size > 0; return n; }
int fake_opened(void) { int n = 0; for (int i = 0; i < MOST; i++) n += shared[i].address && shared[i].opened; return n; }
size_t fake_live(void) {
    size_t n = 0;
    for (int i = 0; i < MOST; i++) n += physicals[i].size + (shared[i].address && !shared[i].opened ? shared[i].handle.of.size : 0);
    return n;
}

static int begin(const char *name) {
    if (!current) return INVALID_CONTEXT;
    if (strcmp(name, fails) == 0 && countdown-- == 0) return code;
    return OK;
}

#define BEGIN do { int error = begin(__func__); if (error) return error; } while (0)
#define REQUIRE(condition) do { if (!(condition)) return INVALID_VALUE; } while (0)

static int sound(const Properties *p) { return p->type == 1 && p->location.type == 1 && p->location.id == 0; }

static void let_go(int i) {
    if (--physicals[i].holders == 0) close(physicals[i].file), physicals[i].size = 0;
}

static int covered(u64 address, size_t size) {  // by mappings, all of it
    size_t found = 0;
    for (int i = 0; i < MOST; i++)
        if (mappings[i].size && mappings[i].address >= address && mappings[i].address < address + size) found += mappings[i].size;
    return found == size;
}

int cuInit(unsigned flags) { return flags == 0 ? OK : INVALID_VALUE; }

int cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : error == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : NULL;
    return *name ? OK : INVALID_VALUE;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *all) { BEGIN; *free_bytes = total - fake_live(), *all = total; return OK; }

int cuMemGetAllocationGranularity(size_t *unit, const Properties *p, int option) {
    BEGIN; REQUIRE(sound(p) && option == 1); *unit = UNIT; return OK;
}

int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) {
    BEGIN; REQUIRE(size && size % UNIT == 0 && !alignment && !wanted && !flags);
    for (int i = 0; i < MOST; i++) if (!ranges[i].size) {
        void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) return OUT_OF_MEMORY;
        ranges[i] = (Mapping){*address = (u64)at, size, 0};
        return OK;
    }
    return OUT_OF_MEMORY;
}

int cuMemAddressFree(u64 address, size_t size) {
    BEGIN;
    for (int i = 0; i < MOST; i++) if (ranges[i].size == size && ranges[i].address == address) {
        for (int k = 0; k < MOST; k++) REQUIRE(!mappings[k].size || mappings[k].address + mappings[k].size <= address || mappings[k].address >= address + size);
        munmap((void *)address, size), ranges[i].size = 0;
        return OK;
    }
    return INVALID_VALUE;
}

int cuMemCreate(u64 *handle, size_t size, const Properties *p, u64 flags) {
    BEGIN; REQUIRE(sound(p) && size && size % UNIT == 0 && !flags);
    if (fake_live() + size > total) return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++) if (!physicals[i].size) {
        physicals[i] = (Physical){memfd_create("fake", 0), 1, size};
        if (physicals[i].file < 0 || ftruncate(physicals[i].file, size)) return OUT_OF_MEMORY;
        *handle = i + 1;
        return OK;
    }
    return OUT_OF_MEMORY;
}

int cuMemRelease(u64 handle) { BEGIN; REQUIRE(handle && handle <= MOST && physicals[handle - 1].size); let_go(handle - 1); return OK; }

int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    BEGIN; REQUIRE(handle && handle <= MOST && physicals[handle - 1].size == size && !offset && !flags);
    int inside = 0, slot = -1;
    for (int i = 0; i < MOST; i++) {
        inside |= ranges[i].size && ranges[i].address <= address && address + size <= ranges[i].address + ranges[i].size;
        REQUIRE(!mappings[i].size || mappings[i].address + mappings[i].size <= address || mappings[i].address >= address + size);
        if (!mappings[i].size) slot = i;
    }
    REQUIRE(inside && slot >= 0);
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physicals[handle - 1].file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    physicals[handle - 1].holders++, mappings[slot] = (Mapping){address, size, handle - 1};
    return OK;
}

int cuMemSetAccess(u64 address, size_t size, const Access *access, size_t count) {
    BEGIN; REQUIRE(count == 1 && access->flags == 3 && access->location.type == 1 && access->location.id == 0 && covered(address, size));
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}

int cuMemUnmap(u64 address, size_t size) {
    BEGIN;
    for (int i = 0; i < MOST; i++) if (mappings[i].size == size && mappings[i].address == address) {
        mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        mappings[i].size = 0, let_go(mappings[i].physical);
        return OK;
    }
    return INVALID_VALUE;
}

static Shared *find(u64 address) {
    for (int i = 0; i < MOST; i++) if (shared[i].address == address) return &shared[i];
    return NULL;
}

static int attach(Shared *new) {
    void *at = mmap(NULL, new->handle.of.size, PROT_READ | PROT_WRITE, MAP_SHARED, new->handle.of.file, 0);
    Shared *slot = find(0);
    if (at == MAP_FAILED || !slot) return OUT_OF_MEMORY;
    new->address = (u64)at, *slot = *new;
    return OK;
}

static int detach(u64 address, int opened) {
    Shared *at = address ? find(address) : NULL;
    REQUIRE(at && at->opened == opened);
    munmap((void *)address, at->handle.of.size), close(at->handle.of.file), at->address = 0;
    return OK;
}

int cuMemAlloc_v2(u64 *address, size_t size) {
    BEGIN; REQUIRE(size);
    if (fake_live() + size > total) return OUT_OF_MEMORY;
    Shared new = {.handle.of = {getpid(), memfd_create("shared", 0), size}};
    if (new.handle.of.file < 0 || ftruncate(new.handle.of.file, size) || attach(&new)) return OUT_OF_MEMORY;
    *address = new.address;
    return OK;
}

int cuMemFree_v2(u64 address) { BEGIN; return detach(address, 0); }

int cuIpcGetMemHandle(Handle *handle, u64 address) {
    BEGIN; Shared *at = address ? find(address) : NULL;
    REQUIRE(at && !at->opened); *handle = at->handle;
    return OK;
}

int cuIpcOpenMemHandle_v2(u64 *address, Handle handle, unsigned flags) {
    BEGIN; REQUIRE(flags == 1 && handle.of.process != getpid());  // a process cannot open what is its own
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.of.process, handle.of.file);
    Shared new = {.handle = handle, .opened = 1};
    if ((new.handle.of.file = open(path, O_RDWR)) < 0) return INVALID_VALUE;
    int error = attach(&new);
    *address = new.address;
    return error;
}

int cuIpcCloseMemHandle(u64 address) { BEGIN; return detach(address, 1); }

int cuMemcpyDtoDAsync_v2(u64 target, u64 source, size_t size, void *stream) {
    BEGIN; REQUIRE(!stream && size && queued < MOST);
    void *data = memcpy(malloc(size), (void *)source, size);
    queue[queued].target = (void *)target, queue[queued].data = data, queue[queued++].size = size;
    return OK;
}

int cuStreamSynchronize(void *stream) {
    BEGIN; REQUIRE(!stream);
    for (int i = 0; i < queued; i++) memcpy(queue[i].target, queue[i].data, queue[i].size), free(queue[i].data);
    queued = 0;
    return OK;
}
