// Rows of a table by index, and the gradient of the table.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/table_part.h"

namespace sheaf::kernels {
namespace cpu {

/// out[.., C] = table[tokens[..], C], and zeros for tokens whose rows are in another part of the table. Tokens have
/// any index type; one outside all parts is a DataError that names position, token and vocabulary.
void embedding(const View& tokens, const View& table, TablePart part, const View& out);

/// dtable[n, C] = the rows of dout[.., C] summed by token, in row order; stored, or with `accumulate` added one by one to the
/// contents. Tokens of other parts add nothing. bf16 and f16 are summed in f32 and rounded once.
size_t embedding_backward_workspace(const View& tokens, const View& dout, const View& dtable);
void embedding_backward(const View& tokens, const View& dout, TablePart part, const View& dtable,
                        bool accumulate, Workspace workspace);

/// Throws DataError unless every target of a loss is in [0, classes) or equals `ignore_index`.
void check_targets(const char* who, const View& targets, int64_t classes, int64_t ignore_index);

}  // namespace cpu

/// The same on a GPU, enqueued on `stream`. A token outside the vocabulary gives a row of NaN, and its row of dout is not added to
/// the gradient.
namespace cuda {

void embedding(const Stream& stream, const View& tokens, const View& table, TablePart part,
               const View& out);

/// For a token of at most 128 rows, the CPU's sum. Rows of more frequent ones are summed 128 at a time, in row
/// order, and then these sums, in order.
size_t embedding_backward_workspace(const View& tokens, const View& dout, const View& dtable);
void embedding_backward(const Stream& stream, const View& tokens, const View& dout, TablePart part,
                        const View& dtable, bool accumulate, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
