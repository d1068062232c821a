#include "plain_memory.h"

#include <link.h>

#include <cstdlib>
#include <cstring>

#include "error.h"
#include "wave.h"

namespace kda::emulator {
namespace {

struct Span {
  const char *begin = nullptr, *end = nullptr;
  bool holds(const void* at) const { return at >= begin && at < end; }
};

// Where the program itself has the variables of this thread of the host, which __shared__ variables are: right below
// the thread's own block (x86-64, variant II).
Span thread_variables() {
  Span span;
  const auto look = [](dl_phdr_info* info, size_t, void* to) {
    if (info->dlpi_name && *info->dlpi_name) return 0;  // a library
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const ElfW(Phdr)& part = info->dlpi_phdr[i];
      if (part.p_type != PT_TLS) continue;
      const size_t bytes = (part.p_memsz + part.p_align - 1) / part.p_align * part.p_align;
      const char* own;
      asm("movq %%fs:0, %0" : "=r"(own));
      *static_cast<Span*>(to) = {own - bytes, own - bytes + part.p_memsz};
    }
    return 1;
  };
  dl_iterate_phdr(look, &span);
  return span;
}

PlainMemory::Thread running_thread() {
  const Block& block = wave->block();
  return {wave->thread(), block.number, block.has_acquired};
}

}  // namespace

// In one block, or in two that run: what the clocks say. A block that has ended is known by flags alone.
bool PlainMemory::is_after(const Access& a, const Thread& by) const {
  if (a.block != by.block && !wave->runs(a.thread, a.block)) return by.has_acquired;
  return order_.after(by.thread, a.thread / kLanes, 1u << a.thread % kLanes, a.time);
}

void PlainMemory::fail_at(const void* at, const char* what, const char* before, const Access& a, Where where) const {
  const unsigned padded = wave->threads_of_block();
  fail(str(what, " ", name_, " at ", at, ", which thread ", a.thread % padded, " of block ", a.block, " of the launch ",
           before, " at ", text_of(a.where), " without an order in between"),
       where);
}

void PlainMemory::access(const void* at, unsigned bytes, const Thread& by, Kind kind, Where where) {
  const auto first = reinterpret_cast<uintptr_t>(at) / kGrain, end = (reinterpret_cast<uintptr_t>(at) + bytes) / kGrain;
  const Access own{order_.now(), static_cast<uint16_t>(by.thread), kind == Kind::kAtomic, by.block, where};
  const auto fine = [&](const Access& a) { return !a.time || (a.atomic && own.atomic) || is_after(a, by); };
  // Lanes of a warp may write the same, which is not known here.
  const auto of_warp = [&](const Access& a) { return a.block == by.block && a.thread / kLanes == by.thread / kLanes; };
  Line* line = nullptr;
  for (uintptr_t i = first; i < end; ++i) {
    if (!line || i % (kLine / kGrain) == 0) line = &lines_[i / (kLine / kGrain)];
    Grain& g = (*line)[i % (kLine / kGrain)];
    if (kind == Kind::kRead) {
      if (!fine(g.write)) fail_at(at, "reads", "wrote", g.write, where);
      bool found = false;
      for (Access& r : g.reads)
        if (r.time && r.thread == own.thread && r.block == own.block) r = own, found = true;
      if (!found) g.reads[g.next++ % kReads] = own;
      continue;
    }
    if (!fine(g.write) && !of_warp(g.write)) fail_at(at, "writes", "wrote", g.write, where);
    for (const Access& r : g.reads)
      if (!fine(r) && !of_warp(r)) fail_at(at, "writes", "read", r, where);
    g.write = own, g.reads = {};
  }
}

bool& watches_global() {
#ifdef KDA_EMULATOR_POINTERS
  static bool own = true;
#else
  static bool own = [] {
    const char* given = std::getenv("KDA_EMULATOR_GLOBAL");
    return given && !std::strcmp(given, "1");
  }();
#endif
  return own;
}

void access_global(const void* at, unsigned bytes, PlainMemory::Kind kind, Where where) {
  if (watches_global() && !wave->is_stack(at)) wave->global().access(at, bytes, running_thread(), kind, where);
}

void access_by_pointer(const void* at, unsigned bytes, PlainMemory::Kind kind) {
  static thread_local const Span variables = thread_variables();
  Block& block = wave->block();
  if (wave->is_stack(at) || bytes < 2) return;
  if (!variables.holds(at)) return access_global(at, bytes, kind, {});
  if (block.memory.access_plainly(at, bytes, wave->thread(), kind != PlainMemory::Kind::kRead)) return;
  block.variables.access(at, bytes, running_thread(), kind, {});
}

}  // namespace kda::emulator
