// Memory of both sides: managed, and of the host but mapped.
#include "check.h"

struct Node {
  int value;
  Node* next;
};
__global__ void walk(const Node* node, int* sum) {
  for (*sum = 0; node; node = node->next) *sum += node->value;
}
int main() {
  Node* nodes;
  int *sum, *device;
  CHECK(cudaMallocManaged(&nodes, 10 * sizeof(Node)));
  CHECK(cudaHostAlloc(&sum, sizeof(int), cudaHostAllocMapped));
  CHECK(cudaHostGetDevicePointer(&device, sum, 0));
  for (int i = 0; i < 10; i++) nodes[i] = {i * i, i < 9 ? &nodes[i + 1] : nullptr};
  walk<<<1, 1>>>(nodes, device);
  CHECK(cudaDeviceSynchronize());
  WANT(*sum == 285);
  CHECK(cudaFree(nodes));
  CHECK(cudaFreeHost(sum));
  return 0;
}
