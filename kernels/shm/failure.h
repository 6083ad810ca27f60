// What a failed call throws inside the library; the C interface turns it into a status.

#pragma once

#include <string>

namespace fsdp_tp {

struct Failure {
  int status;  // fsdp_tp_status or fsdp_tp_group_status
  std::string message;
  bool agreed = false;  // all ranks fail alike and know it, so the group stays fit for use
};

// FSDP_TP_SYSTEM, with errno's text.
Failure system_failure(const std::string& call);

}  // namespace fsdp_tp
