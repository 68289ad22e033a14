// A call of an operator from Python: the short way into its CPU kernel where
// PyTorch's dispatcher would do nothing but enter that kernel or record a
// gradient around it (thread_state.h says when), and the long way through the
// dispatcher for all else, errors included.
#pragma once

#include <string>

#include "host/kernel_library.h"
#include "python/below_autograd.h"
#include "python/pybind_headers.h"
#include "python/signature.h"

namespace pkg::python {

struct OperatorCall {
  const Signature* signature;
  DirectKernel kernel = nullptr;  // null where there is no short way
  std::string observed_as;        // empty where observers know of the call
  bool is_checked = true;         // whether the thread's state is asked for
  bool has_autocast = false;      // whether autocast changes the operator
  py::object record;              // computes and records a gradient, or null
  py::object otherwise;   // takes all by position; null: the operator itself
  py::object dispatched;  // torch.ops.<namespace>.<name>.default
  BelowAutograd below_autograd{};  // where the device has no short way

  // One value for each parameter, in their order.
  PyObject* operator()(PyObject* const* values) const;

 private:
  bool are_plain(PyObject* const* values) const;
  bool needs_gradient(PyObject* const* values) const;
  bool are_past_autocast(PyObject* const* values) const;
  // Null without an error where the kernel does not take the values.
  PyObject* run(PyObject* const* values, bool may_be_observed) const;
  bool convert_all(PyObject* const* values, bool are_written,
                   DirectArgument* arguments) const;
  bool count_writes(PyObject* const* values) const;
  bool enter(const DirectArgument* arguments, DirectResults& results,
             bool may_be_observed) const;
  PyObject* call_record(PyObject* const* values) const;
  PyObject* other_way(PyObject* const* values, bool may_be_observed) const;
  PyObject* long_way(PyObject* const* values) const;
  PyObject* dispatch(PyObject* const* values) const;
  bool are_refused(PyObject* const* values) const;
  void explain(PyObject* const* values) const;
};

}  // namespace pkg::python
