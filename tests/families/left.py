"""What of diffusers' transformers and ControlNets stays stock, and why; its norms and activations run the ops.

`LEFT` names models; benchmarks/readme.py writes them into docs/models.md. `LEFT_BLOCKS` names blocks that stand in a
model beside blocks of a family.
"""

from __future__ import annotations

NOT_YET = "the block has no description yet"
COPY = "a copy of BasicTransformerBlock with parts of its own"
LINEAR = "linear attention and convolutions take most of its time"
EXPERTS = "a mixture of experts takes most of its time"

LEFT: dict[str, str] = {
    **dict.fromkeys(
        (
            "AllegroTransformer3DModel",
            "AnyFlowFARTransformer3DModel",
            "AnyFlowTransformer3DModel",
            "CogView3PlusTransformer2DModel",
            "CogView4Transformer2DModel",
            "EasyAnimateTransformer3DModel",
            "GlmImageTransformer2DModel",
            "HeliosTransformer3DModel",
            "HunyuanDiT2DControlNetModel",
            "HunyuanDiT2DModel",
            "HunyuanDiT2DMultiControlNetModel",
            "JoyImageEditPlusTransformer3DModel",
            "JoyImageEditTransformer3DModel",
            "Kandinsky6SRTransformer3DModel",
            "Kandinsky6Transformer3DModel",
            "LongCatAudioDiTTransformer",
            "LuminaNextDiT2DModel",
            "MiniMaxMusic3RVQDepthDecoder",
            "MiniMaxMusic3Transformer1DModel",
            "MotifVideoTransformer3DModel",
            "OmniGenTransformer2DModel",
            "PRXTransformer2DModel",
            "RFD4ProteinaTransformer",
            "SanaWMLTX2RefinerTransformer3DModel",
            "StableAudio3DiTModel",
            "StableAudioDiTModel",
            "T5FilmDecoder",
            "WanAnimate2Transformer3DModel",
        ),
        NOT_YET,
    ),
    **dict.fromkeys(
        (
            "SanaControlNetModel",
            "SanaTransformer2DModel",
            "SanaVideoTransformer3DModel",
            "SanaWMTransformer3DModel",
        ),
        LINEAR,
    ),
    "NucleusMoEImageTransformer2DModel": EXPERTS,
    "DreamLiteTransformer2DModel": COPY,
}

# Models of the family basic_transformer whose files of diffusers import no block of it: UNets hold the blocks.
OF_UNETS = (
    "ControlNetModel",
    "ControlNetUnionModel",
    "ControlNetXSAdapter",
    "MultiControlNetModel",
    "MultiControlNetUnionModel",
    "SparseControlNetModel",
    "UNetControlNetXSModel",
)

# Those that a reader of the README's table looks for.
WELL_KNOWN = ("Kandinsky6Transformer3DModel",)

FEW_TOKENS = "it runs once per forward, on the tokens of the prompt"
LEFT_BLOCKS: dict[str, str] = {
    **dict.fromkeys(
        (
            "HunyuanImageIndividualTokenRefinerBlock",
            "HunyuanVideo15IndividualTokenRefinerBlock",
            "HunyuanVideoIndividualTokenRefinerBlock",
        ),
        FEW_TOKENS,
    ),
    "AuraFlowPreFinalBlock": "it modulates once per forward, after the blocks",
    "HiDreamBlock": "it only calls the block that it holds",
    "MotionEncoderResBlock": "convolutions take its time",
    "TemporalBasicTransformerBlock": "Stable Video Diffusion alone has it, and it has no description yet",
    "SD3SingleTransformerBlock": "no released model but a ControlNet without text has it",
}
