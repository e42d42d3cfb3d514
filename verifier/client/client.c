// A CUDA program that measures how much memory of the first card it gets. It speaks the driver API alone, whose declarations are
// here as NVIDIA's public cuda.h has them (CUDA 11 to 13), so that neither CUDA nor a card is needed to build it.
//
//   client CUDA STEP_MIB STEP...
//
// CUDA is how it finds the driver's functions: 11000 by their exported names, from 12000 by cuGetProcAddress as a program that was
// built for that version does. Each STEP is done in turn and answers with a line of JSON:
//
//   take:A:MIB     allocates by A in steps of STEP_MIB until MIB are had or a call fails
//   free           frees all that was taken
//   info           what the driver says of the card's memory
//   entries        which file each function is in
//   hold           waits for the end of standard input
//   exec           replaces this process by another one of this program, with the steps that follow
//   exec-clean     the same without its environment, but for LD_LIBRARY_PATH
//   spawn          the steps that follow are of such a process, a child; this one keeps what it has until that has ended
//   spawn-clean    the same without its environment, but for LD_LIBRARY_PATH
//   fork:A:MIB     the steps that follow are of a fork; this process then takes MIB by A before the fork goes on. Must be first.
//
// A process that takes a minute is ended.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// ---- cuda.h ----

typedef int result;
enum { SUCCESS = 0, NOT_FOUND = 500 };
typedef struct { size_t width, height; int format; unsigned channels; } array_2d;
typedef struct { size_t width, height, depth; int format; unsigned channels, flags; } array_3d;
typedef struct { int type, handles; struct { int type, id; } location; void *win32; size_t size; unsigned char rest[56]; } pool_properties;
typedef struct { int type, handles; struct { int type, id; } location; void *win32; unsigned char flags[8]; } memory_properties;
enum { PINNED = 1, MANAGED = 2, DEVICE = 1, GLOBAL = 1, FLOAT = 0x20, PER_THREAD_STREAM = 2 };

// ---- the driver's functions ----

static void *library;
static int cuda;
static long step_mib;

static void fail(const char *what, result code) {
  printf("{\"step\":\"failed\",\"what\":\"%s\",\"code\":%d}\n", what, code);
  exit(1);
}

// NULL where the driver has none of this name. `suffix` is that of the exported name.
static void *function(const char *name, const char *suffix, uint64_t flags) {
  char exported[64];
  snprintf(exported, sizeof exported, "%s%s%s", name, suffix, flags & PER_THREAD_STREAM ? "_ptsz" : "");
  if (cuda < 12000) return dlsym(library, exported);
  static result (*get)(const char *, void **, int, uint64_t, int *);
  if (!get && !(get = dlsym(library, "cuGetProcAddress_v2"))) fail("cuGetProcAddress_v2", NOT_FOUND);
  void *found = NULL;
  int status = 0;
  return get(name, &found, cuda, flags, &status) == SUCCESS ? found : NULL;
}

#define CALL(name, suffix, ...) ({ \
  result (*f)() = function(name, suffix, 0); \
  if (!f) fail(name, NOT_FOUND); \
  f(__VA_ARGS__); })
#define MUST(name, suffix, ...) do { result r = CALL(name, suffix, __VA_ARGS__); if (r) fail(name, r); } while (0)

static void start(void) {
  static int started;
  if (started) return;
  started = 1;
  int device;
  void *context;
  MUST("cuInit", "", 0U);
  MUST("cuDeviceGet", "", &device, 0);
  MUST("cuDevicePrimaryCtxRetain", "", &context, device);
  MUST("cuCtxSetCurrent", "", context);
}

// ---- allocation ----

typedef struct taken { struct taken *next; void (*give_back)(uint64_t); uint64_t what; } taken;
static taken *all;

static void *pool, *managed_pool;

static void synchronize(void) { MUST("cuStreamSynchronize", "", NULL); }
static void free_memory(uint64_t p) { MUST("cuMemFree", "_v2", p); }
static void free_async(uint64_t p) { MUST("cuMemFreeAsync", "", p, NULL); }
static void free_async_per_thread(uint64_t p) {
  result (*f)(uint64_t, void *) = function("cuMemFreeAsync", "", PER_THREAD_STREAM);
  if (!f) fail("cuMemFreeAsync_ptsz", NOT_FOUND);
  if (f(p, NULL)) fail("cuMemFreeAsync_ptsz", 1);
}
static void release(uint64_t p) { MUST("cuMemRelease", "", p); }
static void destroy_array(uint64_t p) { MUST("cuArrayDestroy", "", (void *)p); }
static void destroy_mipmapped(uint64_t p) { MUST("cuMipmappedArrayDestroy", "", (void *)p); }

// Each allocates so many MiB; NOT_FOUND where there is no such function.
#define ALLOCATE(name, suffix, ...) ({ result (*f)() = function(name, suffix, 0); f ? f(__VA_ARGS__) : NOT_FOUND; })

static result take_malloc(uint64_t *p, size_t mib) { return ALLOCATE("cuMemAlloc", "_v2", p, mib << 20); }
static result take_pitch(uint64_t *p, size_t mib) {
  size_t pitch;
  return ALLOCATE("cuMemAllocPitch", "_v2", p, &pitch, (size_t)1 << 20, mib, 16U);
}
static result take_managed(uint64_t *p, size_t mib) { return ALLOCATE("cuMemAllocManaged", "", p, mib << 20, (unsigned)GLOBAL); }
static result take_async(uint64_t *p, size_t mib) { return ALLOCATE("cuMemAllocAsync", "", p, mib << 20, NULL); }
static result take_async_per_thread(uint64_t *p, size_t mib) {
  result (*f)(uint64_t *, size_t, void *) = function("cuMemAllocAsync", "", PER_THREAD_STREAM);
  return f ? f(p, mib << 20, NULL) : NOT_FOUND;
}
static result from_pool(void **of, int type, uint64_t *p, size_t mib) {
  if (!*of) {
    pool_properties properties = {.type = type, .location = {DEVICE, 0}};
    result r = ALLOCATE("cuMemPoolCreate", "", of, &properties);
    if (r) return r;
  }
  return ALLOCATE("cuMemAllocFromPoolAsync", "", p, mib << 20, *of, NULL);
}
static result take_pool(uint64_t *p, size_t mib) { return from_pool(&pool, PINNED, p, mib); }
static result take_managed_pool(uint64_t *p, size_t mib) {
  return cuda < 13000 ? NOT_FOUND : from_pool(&managed_pool, MANAGED, p, mib);
}
static result take_vmm(uint64_t *p, size_t mib) {
  memory_properties properties = {.type = PINNED, .location = {DEVICE, 0}};
  return ALLOCATE("cuMemCreate", "", p, mib << 20, &properties, (uint64_t)0);
}
static result take_array(uint64_t *p, size_t mib) {
  array_2d shape = {1024, mib * 64, FLOAT, 4};
  return ALLOCATE("cuArrayCreate", "_v2", p, &shape);
}
static result take_array_3d(uint64_t *p, size_t mib) {
  array_3d shape = {1024, 64, mib, FLOAT, 4, 0};
  return ALLOCATE("cuArray3DCreate", "_v2", p, &shape);
}
static result take_mipmapped(uint64_t *p, size_t mib) {
  array_3d shape = {1024, mib * 64, 0, FLOAT, 4, 0};
  return ALLOCATE("cuMipmappedArrayCreate", "", p, &shape, 1U);
}

static const struct allocator {
  const char *name;
  result (*take)(uint64_t *, size_t);
  void (*give_back)(uint64_t);
} ALLOCATORS[] = {
  {"malloc", take_malloc, free_memory},
  {"pitch", take_pitch, free_memory},
  {"managed", take_managed, free_memory},
  {"async", take_async, free_async},
  {"async-per-thread", take_async_per_thread, free_async_per_thread},
  {"pool", take_pool, free_async},
  {"managed-pool", take_managed_pool, free_async},
  {"vmm", take_vmm, release},
  {"array", take_array, destroy_array},
  {"array-3d", take_array_3d, destroy_array},
  {"mipmapped-array", take_mipmapped, destroy_mipmapped},
};
enum { ALLOCATOR_COUNT = sizeof ALLOCATORS / sizeof *ALLOCATORS };

// `argument` is A:MIB.
static void take(const char *argument) {
  const char *colon = strchr(argument, ':');
  if (!colon) fail("take without MIB", 1);
  const struct allocator *by = NULL;
  for (int i = 0; i < ALLOCATOR_COUNT; i++)
    if (strlen(ALLOCATORS[i].name) == (size_t)(colon - argument) && !strncmp(argument, ALLOCATORS[i].name, colon - argument))
      by = &ALLOCATORS[i];
  if (!by) fail("unknown allocator", 1);
  long wanted = atol(colon + 1), had = 0;
  result code = SUCCESS;
  start();
  while (had < wanted) {
    uint64_t p = 0;
    if ((code = by->take(&p, step_mib))) break;
    taken *one = malloc(sizeof *one);
    *one = (taken){all, by->give_back, p};
    all = one;
    had += step_mib;
  }
  printf("{\"step\":\"take\",\"allocator\":\"%s\",\"mib\":%ld,\"code\":%d}\n", by->name, had, code);
}

static void give_back(void) {
  while (all) {
    taken *one = all;
    all = one->next;
    one->give_back(one->what);
    free(one);
  }
  synchronize();
  if (pool) MUST("cuMemPoolDestroy", "", pool);
  if (managed_pool) MUST("cuMemPoolDestroy", "", managed_pool);
  pool = managed_pool = NULL;
}

static void info(void) {
  size_t left, total, of_device;
  start();
  MUST("cuMemGetInfo", "_v2", &left, &total);
  MUST("cuDeviceTotalMem", "_v2", &of_device, 0);
  printf("{\"step\":\"info\",\"free\":%zu,\"total\":%zu,\"device\":%zu}\n", left >> 20, total >> 20, of_device >> 20);
}

static void entries(void) {
  static const struct { const char *name, *suffix; uint64_t flags; } NAMES[] = {
    {"cuMemAlloc", "_v2", 0}, {"cuMemAllocPitch", "_v2", 0}, {"cuMemAllocManaged", "", 0}, {"cuMemAllocAsync", "", 0},
    {"cuMemAllocAsync", "", PER_THREAD_STREAM}, {"cuMemAllocFromPoolAsync", "", 0}, {"cuMemCreate", "", 0}, {"cuArrayCreate", "_v2", 0},
    {"cuArray3DCreate", "_v2", 0}, {"cuMipmappedArrayCreate", "", 0}, {"cuMemGetInfo", "_v2", 0}, {"cuDeviceTotalMem", "_v2", 0},
    {"cuLaunchKernel", "", 0}, {"cuGetErrorString", "", 0},
  };
  start();
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
    void *found = function(NAMES[i].name, NAMES[i].suffix, NAMES[i].flags);
    Dl_info where = {0};
    char file[4096] = "";
    if (!found) continue;
    if (!dladdr(found, &where) || !realpath(where.dli_fname, file)) strcpy(file, "?");
    printf("{\"step\":\"entry\",\"name\":\"%s%s\",\"file\":\"%s\"}\n", NAMES[i].name, NAMES[i].flags ? "_ptsz" : "", file);
  }
}

// ---- processes ----

static void run_again(char **arguments, char **steps, int clean) {
  extern char **environ;
  char kept[4096] = "", *few[] = {kept, NULL}, *path = getenv("LD_LIBRARY_PATH");
  if (path) snprintf(kept, sizeof kept, "LD_LIBRARY_PATH=%s", path);
  else few[0] = NULL;
  int count = 3;
  for (char **s = steps; *s; s++) count++;
  char **next = calloc(count + 1, sizeof *next);
  memcpy(next, arguments, 3 * sizeof *next);
  for (int i = 3; *steps; i++) next[i] = *steps++;
  fflush(stdout);
  execve("/proc/self/exe", next, clean ? few : environ);
  fail("execve", 1);
}

static void wait_for(pid_t child) {
  int status;
  if (waitpid(child, &status, 0) != child || status) fail("its child", status);
  exit(0);
}

static void spawn(char **arguments, char **steps, int clean) {
  fflush(stdout);
  pid_t child = fork();
  if (child < 0) fail("fork", 1);
  if (!child) run_again(arguments, steps, clean);
  wait_for(child);
}

// Returns in the fork.
static void fork_and_take(const char *argument) {
  int ready[2];
  char byte = 0;
  if (pipe(ready)) fail("pipe", 1);
  fflush(stdout);
  pid_t child = fork();
  if (child < 0) fail("fork", 1);
  if (child) {
    take(argument);
    fflush(stdout);
    if (write(ready[1], &byte, 1) != 1) fail("write", 1);
    wait_for(child);
  }
  alarm(60);
  close(ready[1]);
  // Where the parent has failed there is nothing to measure.
  if (read(ready[0], &byte, 1) != 1) exit(1);
}

int main(int count, char **arguments) {
  if (count < 4) fail("usage: client CUDA STEP_MIB STEP...", 1);
  alarm(60);
  cuda = atoi(arguments[1]);
  step_mib = atol(arguments[2]);
  // A preloaded library may be in the way of the driver from the start of a program on.
  if (!(library = dlopen("libcuda.so.1", RTLD_NOW))) fail("libcuda.so.1", NOT_FOUND);
  for (char **step = arguments + 3; *step; step++) {
    char byte;
    if (!strncmp(*step, "take:", 5)) take(*step + 5);
    else if (!strncmp(*step, "fork:", 5)) fork_and_take(*step + 5);
    else if (!strcmp(*step, "free")) give_back();
    else if (!strcmp(*step, "info")) info();
    else if (!strcmp(*step, "entries")) entries();
    else if (!strcmp(*step, "exec")) run_again(arguments, step + 1, 0);
    else if (!strcmp(*step, "exec-clean")) run_again(arguments, step + 1, 1);
    else if (!strcmp(*step, "spawn")) spawn(arguments, step + 1, 0);
    else if (!strcmp(*step, "spawn-clean")) spawn(arguments, step + 1, 1);
    else if (!strcmp(*step, "hold")) {
      printf("{\"step\":\"hold\"}\n");
      fflush(stdout);
      while (read(0, &byte, 1) > 0) {}
    } else fail("unknown step", 1);
  }
  return 0;
}
