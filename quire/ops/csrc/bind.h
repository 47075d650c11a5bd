// What each part adds to the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace quire {

void bind_matrix(nanobind::module_& m);     // matrix_bind.cpp: pack, embed, linear
void bind_attention(nanobind::module_& m);  // attention_bind.cpp: rope, pages, attention
void bind_page_work(nanobind::module_& m);  // page_work_bind.cpp: copying, rotating, moving in pages
void bind_experts(nanobind::module_& m);    // experts_bind.cpp: experts, add_gated
void bind_sampling(nanobind::module_& m);   // sampling_bind.cpp: sample, logprobs
void bind_recurrent(nanobind::module_& m);  // recurrent_bind.cpp: states, recurrent layers, gates

}  // namespace quire
