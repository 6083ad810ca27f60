// How torch's own bindings hold objects in Python; its torch/csrc/utils/pybind.h takes a minute to compile.

#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true);

namespace fsdp_tp {

// Another owner of an object that Python holds.
template <typename T>
c10::intrusive_ptr<T> shared(T& object) {
  return c10::intrusive_ptr<T>::reclaim_copy(&object);
}

}  // namespace fsdp_tp
