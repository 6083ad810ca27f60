"""A name that users import is changed on purpose only: then change it here too."""

import inspect

import fsdp_tp
import fsdp_tp.checkpoint
import fsdp_tp.parity
import fsdp_tp.train

SURFACE = {
    "ColumnParallelLinear": "in_features out_features bias mesh gather_output sequence_parallel shared_input "
    "device dtype split",
    "ParallelAttention": "hidden_size num_heads num_kv_heads head_dim bias qk_norm dropout causal rotary_base mesh "
    "sequence_parallel device dtype",
    "ParallelConfig": "tensor_parallel_degree hybrid_shard_degree context_parallel_degree pipeline_parallel_degree",
    "ParallelMLP": "hidden_size intermediate_size gated activation bias dropout mesh sequence_parallel device dtype",
    "ParallelMesh": "device_mesh backend",
    "RowParallelLinear": "in_features out_features bias mesh input_is_parallel sequence_parallel device dtype split",
    "VocabParallelEmbedding": "num_embeddings embedding_dim mesh padding_idx sequence_parallel device dtype",
    "accumulate": "model last",
    "clip_grad_norm_": "parameters max_norm norm_type error_if_nonfinite mesh",
    "fully_shard": "module mesh hybrid_shard_degree reshard_after_forward shard_placement_fn mp_policy offload_policy "
    "ignored_params comm",
    "global_mean": "loss_sum token_count mesh",
    "init_mesh": "tensor_parallel_degree hybrid_shard_degree context_parallel_degree pipeline_parallel_degree "
    "device_type config timeout",
    "initialize": "model seed",
    "parallelize": "model mesh plan sequence_parallel loss_parallel verify",
    "vocab_parallel_cross_entropy": "logits target mesh weight ignore_index label_smoothing reduction chunk_size",
    "vocab_parallel_linear_cross_entropy": "input linear_weight target mesh linear_bias weight ignore_index "
    "label_smoothing reduction chunk_size",
    "register_forward_method": "module name",
    "wrap": "model mesh plan sequence_parallel loss_parallel activation_checkpointing compile reshard_after_forward "
    "mp_policy offload_policy comm seed verify",
}


PARITY = {
    "Layout": "tensor shard replicate sequence_parallel loss_parallel activation_checkpointing compile micro_batches",
    "ParityError": "report",
    "RankError": "message sentence",
    "Report": "levels complete",
    "Result": "layout level verdict first_bad_step first_bad_module sentence comparison losses norms error misfit",
    "WorkerDied": "",
    "Workers": "collective_timeout call_timeout preload",
    "assert_parity": "build_model batches layouts dtype steps reference record repeat loss token_count optimizer wrap "
    "clip max_grad_norm seed workers",
    "compare_curves": "reference curves dtype",
}


def test_names_and_parameters_of_parity():
    assert sorted(PARITY) == sorted(fsdp_tp.parity.__all__)
    for name, parameters in PARITY.items():
        found = getattr(fsdp_tp.parity, name)
        if parameters:
            assert list(inspect.signature(found).parameters) == parameters.split(), name
        assert len(inspect.getdoc(found)) > 40, name


def test_names_and_parameters():
    assert sorted(SURFACE) == fsdp_tp.__all__
    for name, parameters in SURFACE.items():
        assert list(inspect.signature(getattr(fsdp_tp, name)).parameters) == parameters.split(), name


def test_past_the_first_two_arguments_everything_is_keyword_only():
    positional_allowed = {
        "ColumnParallelLinear": 3,
        "RowParallelLinear": 3,
        "clip_grad_norm_": 4,
        "global_mean": 3,
        "vocab_parallel_linear_cross_entropy": 3,
    }
    for name in SURFACE:
        positional = [
            parameter
            for parameter in inspect.signature(getattr(fsdp_tp, name)).parameters.values()
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        assert len(positional) <= positional_allowed.get(name, 2), name


def test_everything_public_has_a_docstring():
    for name in SURFACE:
        assert len(inspect.getdoc(getattr(fsdp_tp, name))) > 60, name
    for name in fsdp_tp.checkpoint.__all__:
        assert inspect.getdoc(getattr(fsdp_tp.checkpoint, name))
    assert inspect.getdoc(fsdp_tp.train.main)
