// Mistakes of the host side, each in a function of its own, and their right
// forms: host NAME. The line of the mistake holds the word FAULT.
#include <cooperative_groups.h>

#include <cstring>
#include <string>

#include "check.h"

enum { N = 1 << 14, BYTES = 4 * N };
__global__ void fill(int* out, int value, int n) {
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = value;
}
__global__ void sum(const int* in, int* out, int n) {
  const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] += in[i];
}
__global__ void dynamic(int* out) {
  extern __shared__ int more[];
  more[threadIdx.x] = 1;
  out[threadIdx.x] = more[threadIdx.x];
}
static int host[2 * N];
__device__ int table[8];
__global__ void meet(int* out) {
  const auto grid = cooperative_groups::this_grid();
  out[grid.thread_rank()] = 1;
  grid.sync();
  if (grid.thread_rank()) return;
  for (unsigned i = 1; i < grid.size(); i++) out[0] += out[i];
}

struct Node {
  int value;
  Node* next;
};
__global__ void push(Node** heads, int n) {
  Node* head = nullptr;
  for (int i = 0; i < n; i++) head = new Node{(int)threadIdx.x + i, head};
  heads[threadIdx.x] = head;
}
__global__ void pop(Node** heads, int* out) {
  int sum = 0;
  for (Node* node = heads[threadIdx.x]; node;) {
    Node* next = node->next;
    sum += node->value;
    free(node);
    node = next;
  }
  out[threadIdx.x] = sum;
}
__global__ void late_read(int* out) {
  int* p = (int*)malloc(4);
  *p = threadIdx.x;
  free(p);
  out[threadIdx.x] = *(volatile int*)p;
}
__global__ void overflow(int* out) {
  char* p = (char*)malloc(10);
  ((volatile char*)p)[10] = 1;
  free(p);
}
__global__ void unwritten(int* out) {
  int* p = (int*)malloc(4);
  out[threadIdx.x] = *p;
  free(p);
}
__global__ void twice(int* out) {
  void* p = malloc(8);
  free(p);
  free(p);
}
__global__ void lost(int* out) {
  *(int*)malloc(24) = 1;
}

static int in_heap(void (*kernel)(int*)) {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  for (int i = 0; i < 2; i++) kernel<<<1, 8>>>(p);  // told once, though of other bytes
  CHECK(cudaDeviceSynchronize());
  return cudaFree(p);
}
static int heap_late_read() { return in_heap(late_read); }
static int heap_overflow() { return in_heap(overflow); }
static int heap_unwritten() { return in_heap(unwritten); }
static int heap_free_twice() { return in_heap(twice); }
static int heap_leak() { return in_heap(lost); }
// Lists that one kernel makes and the next one takes apart, twice.
static int heap() {
  Node** heads;
  int* p;
  size_t size = 0;
  CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 1 << 20));
  CHECK(cudaDeviceGetLimit(&size, cudaLimitMallocHeapSize));
  CHECK(cudaMalloc(&heads, 64 * sizeof *heads));
  CHECK(cudaMalloc(&p, 64 * sizeof *p));
  for (int i = 0; i < 2; i++) {
    push<<<1, 64>>>(heads, 5);
    pop<<<1, 64>>>(heads, p);
  }
  CHECK(cudaMemcpy(host, p, 64 * sizeof *p, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(heads));
  CHECK(cudaFree(p));
  return host[0] != 10 || host[63] != 63 * 5 + 10 || size != 1 << 20;
}
static int copy_too_much() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  cudaMemcpy(p, host, BYTES + 4, cudaMemcpyHostToDevice);  // FAULT
  return cudaFree(p);
}
static int copy_after_free() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaFree(p));
  cudaMemcpy(host, p, BYTES, cudaMemcpyDeviceToHost);  // FAULT
  return 0;
}
static int memset_too_much() {
  int* p;
  CHECK(cudaMalloc(&p, 100));
  cudaMemset(p, 0, 101);  // FAULT
  return cudaFree(p);
}
static int host_reads() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaMemset(p, 0, BYTES));
  CHECK(cudaDeviceSynchronize());
  return *(volatile int*)p;  // FAULT
}
static int block_too_big() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  fill<<<1, 2048>>>(p, 1, N);  // FAULT
  return cudaFree(p);
}
static int grid_too_big() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  fill<<<dim3(1, 70000), 32>>>(p, 1, N);  // FAULT
  return cudaFree(p);
}
static int grid_of_none() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  fill<<<0, 32>>>(p, 1, N);  // FAULT
  return cudaFree(p);
}
static int shared_without_asking() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  dynamic<<<1, 32, 64 << 10>>>(p);  // FAULT
  return cudaFree(p);
}
static int shared_with_asking() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaFuncSetAttribute(dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
  dynamic<<<1, 32, 64 << 10>>>(p);
  CHECK(cudaDeviceSynchronize());
  return cudaFree(p);
}
static int leak() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));  // FAULT
  return 0;
}
static int leak_pinned() {
  int* p;
  CHECK(cudaMallocHost(&p, BYTES));  // FAULT
  return 0;
}
static int copied_unwritten() {
  int *p, *q;
  CHECK(cudaMalloc(&p, 128));
  CHECK(cudaMalloc(&q, 128));
  CHECK(cudaMemset(p, 0, 64));
  CHECK(cudaMemcpy(q, p, 128, cudaMemcpyDeviceToDevice));
  CHECK(cudaMemset(p, 0, 128));
  sum<<<1, 32>>>(q, p, 32);
  CHECK(cudaFree(p));
  return cudaFree(q);
}
static int free_twice() {
  int* p;
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaFree(p));
  cudaFree(p);  // FAULT
  return 0;
}
static int managed(bool wait) {
  int* p;
  CHECK(cudaMallocManaged(&p, BYTES));
  fill<<<N / 256, 256>>>(p, 7, N);
  if (wait) CHECK(cudaDeviceSynchronize());
  const int got = p[N - 1];  // FAULT
  CHECK(cudaFree(p));
  return got != 7 && wait;
}
static int managed_freed() {
  int* p;
  CHECK(cudaMallocManaged(&p, BYTES));
  CHECK(cudaFree(p));
  return *(volatile int*)p;  // FAULT
}
static int managed_early() { return managed(false); }
static int managed_late() { return managed(true); }
static int pinned(bool wait) {
  int *p, *back;
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaMallocHost(&back, BYTES));
  std::memset(back, 0, BYTES);
  fill<<<N / 256, 256, 0, s>>>(p, 7, N);
  CHECK(cudaMemcpyAsync(back, p, BYTES, cudaMemcpyDeviceToHost, s));
  if (wait) CHECK(cudaStreamSynchronize(s));
  const int got = back[N - 1];  // FAULT
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFreeHost(back));
  CHECK(cudaFree(p));
  CHECK(cudaStreamDestroy(s));
  return wait ? got != 7 : got != 0;  // the copy comes late
}
static int pinned_early() { return pinned(false); }
static int pinned_late() { return pinned(true); }
static int source_changed() {
  int *p, *from;
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaMallocHost(&from, 4000));  // its page is nobody else's
  std::memset(from, 0, 4000);
  CHECK(cudaMemcpyAsync(p, from, 4000, cudaMemcpyHostToDevice));
  from[0] = 1;  // FAULT
  CHECK(cudaMemcpy(host, p, 4, cudaMemcpyDeviceToHost));
  CHECK(cudaFreeHost(from));
  CHECK(cudaFree(p));
  return host[0] != 1;
}
static int two_streams(int how) {
  int *a, *b;
  cudaStream_t s, t;
  cudaEvent_t e;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
  CHECK(cudaEventCreate(&e));
  CHECK(cudaMalloc(&a, BYTES));
  CHECK(cudaMalloc(&b, BYTES));
  CHECK(cudaMemset(b, 0, BYTES));
  CHECK(cudaDeviceSynchronize());
  fill<<<N / 256, 256, 0, s>>>(a, 3, how == 3 ? N / 2 : N);
  if (how == 1) {
    CHECK(cudaEventRecord(e, s));
    CHECK(cudaStreamWaitEvent(t, e, 0));
  }
  if (how == 2) CHECK(cudaStreamSynchronize(s));
  if (how == 3)
    fill<<<N / 512, 256, 0, t>>>(a + N / 2, 3, N / 2);
  else
    sum<<<N / 256, 256, 0, t>>>(a, b, N);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  return 0;
}
static int streams_race() { return two_streams(0); }
static int streams_event() { return two_streams(1); }
static int streams_wait() { return two_streams(2); }
static int streams_halves() { return two_streams(3); }
static int memory_falls() {
  size_t before, between, after, total;
  int* p;
  CHECK(cudaMemGetInfo(&before, &total));
  CHECK(cudaMalloc(&p, 64 << 20));
  CHECK(cudaMemGetInfo(&between, &total));
  CHECK(cudaFree(p));
  CHECK(cudaMemGetInfo(&after, &total));
  return before - between < 64 << 20 || after != before || total < before;
}
static int polling() {
  int* p;
  cudaEvent_t e;
  CHECK(cudaMalloc(&p, BYTES));
  CHECK(cudaEventCreate(&e));
  fill<<<N / 256, 256>>>(p, 7, N);
  CHECK(cudaEventRecord(e));
  int turns = 0;
  while (cudaEventQuery(e) == cudaErrorNotReady) turns++;
  CHECK(cudaFree(p));
  return !turns;
}
static int volumes() {
  cudaPitchedPtr p;
  const cudaExtent all = make_cudaExtent(40, 4, 3), part = make_cudaExtent(8, 2, 2);
  CHECK(cudaMalloc3D(&p, all));
  CHECK(cudaMemset3D(p, 1, all));
  memset(host, 0, sizeof host);
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(host, 8, 8, 2);
  copy.dstPtr = p;
  copy.dstPos = make_cudaPos(8, 1, 1);
  copy.extent = part;
  copy.kind = cudaMemcpyHostToDevice;
  CHECK(cudaMemcpy3D(&copy));
  copy.srcPtr = p, copy.dstPtr = make_cudaPitchedPtr(host, 40, 40, 4);
  copy.dstPos = make_cudaPos(0, 0, 0), copy.extent = all, copy.kind = cudaMemcpyDeviceToHost;
  CHECK(cudaMemcpy3D(&copy));
  CHECK(cudaFree(p.ptr));
  int bad = 0;
  for (int z = 0; z < 3; z++)
    for (int y = 0; y < 4; y++)
      for (int x = 0; x < 40; x++) {
        const bool inside = x >= 8 && x < 16 && y >= 1 && y < 3 && z >= 1;
        bad += ((char*)host)[(z * 4 + y) * 40 + x] != !inside;
      }
  return bad;
}
static int hints() {
  int *p, *q, least, greatest;
  cudaStream_t s;
  cudaMemPool_t pool;
  uint64_t kept = UINT64_MAX, found = 0;
  CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
  CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
  CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
  CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &found));
  CHECK(cudaMallocManaged(&p, BYTES));
  cudaMemLocation place = {cudaMemLocationTypeDevice, 0};
  CHECK(cudaMemAdvise(p, BYTES, cudaMemAdviseSetReadMostly, place));
  CHECK(cudaMemPrefetchAsync(p, BYTES, place, 0, s));
  fill<<<N / 256, 256, 0, s>>>(p, 7, N);
  CHECK(cudaMallocAsync(&q, BYTES, s));
  CHECK(cudaMemcpyAsync(q, p, BYTES, cudaMemcpyDeviceToDevice, s));
  CHECK(cudaFreeAsync(q, s));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaMemPoolTrimTo(pool, 0));
  const int bad = p[3] != 7 || found != kept || greatest >= least;
  CHECK(cudaFree(p));
  return bad;
}
static int several() {
  int *p, *q;
  cudaStream_t s, t;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CHECK(cudaStreamCreate(&t));
  CHECK(cudaMalloc(&p, BYTES));
  int bad = !cudaMemcpy(host, p, 4, cudaMemcpyHostToDevice);             // KIND
  bad += !cudaMemcpyToSymbol(table, host, 40);                           // SYMBOL
  bad += !cudaMemcpy2D(p, 16, host, 16, 20, 2, cudaMemcpyHostToDevice);  // ROWS
  CHECK(cudaMemset(p, 0, BYTES));
  CHECK(cudaMemcpy(p + 16, p, 128, cudaMemcpyDeviceToDevice));  // OVERLAP
  void* args[] = {&p};
  bad += !cudaLaunchCooperativeKernel((void*)meet, 1024, 256, args);  // TOGETHER
  CHECK(cudaDeviceSynchronize());
  fill<<<N / 256, 256, 0, s>>>(p, 7, N);
  CHECK(cudaMemcpy(host, p, 4, cudaMemcpyDeviceToHost));  // EARLY
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMallocAsync(&q, BYTES, s));
  fill<<<N / 256, 256, 0, s>>>(q, 7, N);
  CHECK(cudaFreeAsync(q, t));
  CHECK(cudaDeviceSynchronize());
  bad += !cudaFreeHost(p);         // DEVICE
  bad += !cudaMemset(host, 0, 4);  // HOST
  bad += !cudaFreeHost(host);      // PAGEABLE
  cudaEvent_t e;
  float ms;
  CHECK(cudaEventCreate(&e));
  bad += !cudaEventElapsedTime(&ms, e, e);  // RECORDED
  CHECK(cudaEventDestroy(e));
  CHECK(cudaEventRecord(e, t));  // EVENT
  CHECK(cudaStreamDestroy(t));
  fill<<<1, 32, 0, t>>>(p, 7, 32);  // STREAM
  CHECK(cudaFree(p));
  return bad;
}
static void add(void* p) { *(int*)p += 5; }
static int* pages;
static void look(void* p) { *(int*)p += pages[0]; }
// Halves of one pinned buffer in two streams, each there and back, and a host
// function between two copies to the same place.
static int pinned_again() {
  int *p, seen = 0;
  cudaStream_t s[2];
  CHECK(cudaMallocHost(&pages, BYTES));
  CHECK(cudaMalloc(&p, BYTES));
  for (int i = 0; i < N; i++) pages[i] = 1;
  for (int i = 0; i < 2; i++) {
    CHECK(cudaStreamCreate(&s[i]));
    int *there = p + i * N / 2, *here = pages + i * N / 2;
    CHECK(cudaMemcpyAsync(there, here, BYTES / 2, cudaMemcpyHostToDevice, s[i]));
    sum<<<N / 512, 256, 0, s[i]>>>(there, there, N / 2);
    CHECK(cudaMemcpyAsync(here, there, BYTES / 2, cudaMemcpyDeviceToHost, s[i]));
  }
  CHECK(cudaLaunchHostFunc(s[0], look, &seen));
  CHECK(cudaMemsetAsync(p, 0, BYTES / 2, s[0]));
  CHECK(cudaMemcpyAsync(pages, p, BYTES / 2, cudaMemcpyDeviceToHost, s[0]));
  for (cudaStream_t one : s) CHECK(cudaStreamSynchronize(one));
  const int got = pages[0] + 10 * pages[N - 1] + 100 * seen;
  for (cudaStream_t one : s) CHECK(cudaStreamDestroy(one));
  CHECK(cudaFree(p));
  CHECK(cudaFreeHost(pages));
  return got != 220;
}
static int in_order() {
  int *p, *q, called = 0;
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  CHECK(cudaMallocAsync(&q, BYTES, s));
  fill<<<N / 256, 256, 0, s>>>(q, 7, N);
  CHECK(cudaLaunchHostFunc(s, add, &called));
  const int early = called;  // it comes late
  CHECK(cudaFreeAsync(q, s));
  size_t pitch;
  CHECK(cudaMallocPitch(&p, &pitch, 100, 3));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaMemset2D(p, pitch, 1, 100, 3));
  CHECK(cudaMemcpy2DAsync(host, 100, p, pitch, 100, 3, cudaMemcpyDeviceToHost, s));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaFree(p));
  CHECK(cudaMalloc(&p, BYTES));
  void* args[] = {&p};
  CHECK(cudaLaunchCooperativeKernel((void*)meet, 8, 64, args, 0, 0));
  CHECK(cudaMemcpy(host + 100, p, 4, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(p));
  return early || called != 5 || host[74] != 0x01010101 || host[100] != 512;
}

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
#define TRY(f) \
  if (name == #f) return f()
  TRY(copy_too_much);
  TRY(copy_after_free);
  TRY(memset_too_much);
  TRY(host_reads);
  TRY(block_too_big);
  TRY(grid_too_big);
  TRY(grid_of_none);
  TRY(shared_without_asking);
  TRY(shared_with_asking);
  TRY(leak);
  TRY(leak_pinned);
  TRY(copied_unwritten);
  TRY(free_twice);
  TRY(managed_freed);
  TRY(managed_early);
  TRY(managed_late);
  TRY(pinned_early);
  TRY(pinned_late);
  TRY(source_changed);
  TRY(streams_race);
  TRY(streams_event);
  TRY(streams_wait);
  TRY(streams_halves);
  TRY(memory_falls);
  TRY(polling);
  TRY(volumes);
  TRY(hints);
  TRY(heap);
  TRY(heap_late_read);
  TRY(heap_overflow);
  TRY(heap_unwritten);
  TRY(heap_free_twice);
  TRY(heap_leak);
  TRY(several);
  TRY(in_order);
  TRY(pinned_again);
  return 99;
}
