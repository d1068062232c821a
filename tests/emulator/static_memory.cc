// How much static shared memory a kernel has. Its __shared__ variables are thread_local here, and the symbol table of
// the program has their sizes: the name of one is that of its function, with "Z" in front and "E" and its own behind.
#include <elf.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "emulator.h"

extern "C" const char __executable_start;  // by the linker: where the program's first byte is

namespace kda::emulator {
namespace {

struct Symbols {
  std::map<uint64_t, std::string> functions;  // by address
  std::map<std::string, size_t> bytes;        // of the variables of each function
};

// All entries of a table in the file, from `offset` on.
template <class Entry>
std::vector<Entry> table(const std::vector<char>& file, uint64_t offset, size_t count) {
  const auto* from = reinterpret_cast<const Entry*>(file.data() + offset);
  return {from, from + count};
}

// base: where address 0 of the file is in memory.
void add(Symbols& all, const Elf64_Sym& symbol, std::string_view name, uint64_t base) {
  const unsigned type = ELF64_ST_TYPE(symbol.st_info);
  if (type == STT_FUNC && name.starts_with("_Z")) all.functions.emplace(base + symbol.st_value, name);
  // A name like E6memory, perhaps with a number behind it. Longer ones have parts that may contain it as well.
  if (type != STT_TLS || !name.starts_with("_ZZ")) return;
  const size_t end = name.rfind('E');
  all.bytes["_Z" + std::string(name.substr(3, end - 3))] += symbol.st_size;
}

Symbols read_symbols() {
  std::ifstream in("/proc/self/exe", std::ios::binary);
  const std::vector<char> file{std::istreambuf_iterator<char>(in), {}};
  const auto header = table<Elf64_Ehdr>(file, 0, 1)[0];
  const auto sections = table<Elf64_Shdr>(file, header.e_shoff, header.e_shnum);
  const uint64_t base = header.e_type == ET_DYN ? reinterpret_cast<uint64_t>(&__executable_start) : 0;
  Symbols all;
  for (const Elf64_Shdr& s : sections) {
    if (s.sh_type != SHT_SYMTAB) continue;
    const char* const names = file.data() + sections[s.sh_link].sh_offset;
    for (const Elf64_Sym& symbol : table<Elf64_Sym>(file, s.sh_offset, s.sh_size / sizeof(Elf64_Sym)))
      add(all, symbol, names + symbol.st_name, base);
  }
  return all;
}
const Symbols& symbols() {
  static const Symbols all = read_symbols();
  return all;
}

}  // namespace

size_t static_bytes_of(const void* kernel) {
  const auto function = symbols().functions.find(reinterpret_cast<uint64_t>(kernel));
  if (function == symbols().functions.end()) return 0;
  const auto bytes = symbols().bytes.find(function->second);
  return bytes == symbols().bytes.end() ? 0 : bytes->second;
}

std::string misplaced_variables() {
  std::string all;
  for (const auto& [function, bytes] : symbols().bytes)
    if (function.starts_with("_ZN3kda4cuda") && function.find("kernel") == std::string::npos) all += function + "\n";
  return all;
}

}  // namespace kda::emulator
