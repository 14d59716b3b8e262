// The process's end of the socket; see standin.h.
#include "standin.h"

#include <cuda.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

static int channel = -1, memory = -1;
static uint64_t arena;
static char* mine;
uint64_t arena_size;
int late;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void all(int out, const void* data, size_t size) {
  for (char* p = (char*)data; size;) {
    const ssize_t n = out ? write(channel, p, size) : read(channel, p, size);
    if (n <= 0) {
      fprintf(stderr, "nvgpusim: the simulator has gone\n");
      _exit(125);
    }
    p += n;
    size -= (size_t)n;
  }
}
static void connect_once(void) {
  const char* given = getenv("NVGPUSIM_CUDA");
  unsigned long long base, size;
  if (!given || sscanf(given, "%d %d %llx %llx %d", &channel, &memory, &base, &size, &late) != 5) {
    fprintf(stderr, "nvgpusim: start this program by `nvgpusim cuda`\n");
    _exit(125);
  }
  arena = base;
  arena_size = size;
  void* at = mmap((void*)arena, size, late ? PROT_NONE : PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, memory, 0);
  mine = at;
  if (late) mine = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory, 0);
  if (at != (void*)arena || mine == MAP_FAILED) {
    fprintf(stderr, "nvgpusim: %#llx is taken in this process\n", base);
    _exit(125);
  }
  if (late) sim_watch();
}
// The program's own return addresses, innermost first.
static int own(struct dl_phdr_info* info, size_t size, void* data) {
  Request* r = data;
  void* found[32];
  const int n = backtrace(found, 32);
  for (int i = 0, k = 0; i < n && k < FRAMES; i++)
    for (int p = 0; p < info->dlpi_phnum; p++) {
      const ElfW(Phdr)* h = &info->dlpi_phdr[p];
      const uint64_t at = (uint64_t)found[i] - info->dlpi_addr;
      if (h->p_type == PT_LOAD && at - h->p_vaddr < h->p_memsz) r->from[k++] = at - 1;
    }
  return 1;  // the program is the first
}
int ask(uint32_t op, const uint64_t* a, int n, const void* data, size_t size, void* out,
        size_t room) {
  Request r = {op, (uint32_t)size, {0}, {0}};
  Answer answer;
  char rest;
  memcpy(r.a, a, (size_t)n * sizeof *a);
  pthread_mutex_lock(&turn);
  if (channel < 0) connect_once();
  if (late) dl_iterate_phdr(own, &r);
  fflush(stdout);  // kernels print too
  all(1, &r, sizeof r);
  all(1, data, size);
  all(0, &answer, sizeof answer);
  const size_t fits = answer.size < room ? answer.size : room;
  all(0, out, fits);
  for (size_t i = fits; i < answer.size; i++) all(0, &rest, 1);
  pthread_mutex_unlock(&turn);
  return answer.error;
}
void wrong(const char* words, ...) {
  char text[256];
  va_list more;
  va_start(more, words);
  vsnprintf(text, sizeof text, words, more);
  va_end(more);
  if (late) ask(WRONG, 0, 0, text, strlen(text), 0, 0);
}
int is_device(const void* p) {
  return channel >= 0 && (uint64_t)p >= arena && (uint64_t)p < arena + arena_size;
}
void* reach(const void* p) { return is_device(p) ? mine + ((uint64_t)p - arena) : (void*)p; }
void allow(uint64_t at, size_t size, int whether) {
  if (late) mprotect((void*)at, size, whether ? PROT_READ | PROT_WRITE : PROT_NONE);
}
int sim_malloc(uint64_t* at, size_t size, int managed) {
  const uint64_t a[] = {size, (uint64_t)managed};
  return ask(MALLOC, a, 2, 0, 0, at, sizeof *at);
}
int sim_free(uint64_t at) {
  const uint64_t a[] = {at};
  return at ? ask(FREE, a, 1, 0, 0, 0, 0) : 0;
}
int sim_info(uint64_t* free_bytes) { return ask(INFO, 0, 0, 0, 0, free_bytes, sizeof *free_bytes); }
int sim_kernel(uint32_t module, const char* name, Kernel* k) {
  const uint64_t a[] = {module};
  return ask(KERNEL, a, 1, name, strlen(name), k, sizeof *k);
}
int sim_attribute(int what) {
  static const struct {
    CUdevice_attribute what;
    int value;
  } KNOWN[] = {
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 163 << 10},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 1536},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 7},
      {CU_DEVICE_ATTRIBUTE_INTEGRATED, 1},
      {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
  };
  for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++)
    if ((int)KNOWN[i].what == what) return KNOWN[i].value;
  return 0;
}
size_t image_size(const void* data) {  // magic, u16 version, u16 size of the
                                       // header, u64 the rest
  uint64_t size;
  uint16_t header;
  memcpy(&header, (const char*)data + 6, 2);
  memcpy(&size, (const char*)data + 8, 8);
  return header + size;
}
