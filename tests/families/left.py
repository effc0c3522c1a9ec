"""What of diffusers' transformers and ControlNets stays stock, and why; its norms and activations run the ops.

`LEFT` names models; benchmarks/readme.py writes them into docs/models.md. `LEFT_BLOCKS` names blocks that stand in a
model beside blocks of a family.
"""

from __future__ import annotations

NOT_YET = "the block has no description yet"
MANY_FORMS = "BasicTransformerBlock has many forms, by norm_type, and serves UNets"
LINEAR = "linear attention and convolutions take most of its time"
EXPERTS = "a mixture of experts takes most of its time"
UNET = "a UNet, or a ControlNet of one"
CACHE = "its attention keeps keys and values, or segments of its own"

LEFT: dict[str, str] = {
    **dict.fromkeys(
        (
            "AllegroTransformer3DModel",
            "AnyFlowFARTransformer3DModel",
            "AnyFlowTransformer3DModel",
            "AuraFlowTransformer2DModel",
            "CogView3PlusTransformer2DModel",
            "CogView4Transformer2DModel",
            "Cosmos3OmniTransformer",
            "EasyAnimateTransformer3DModel",
            "GlmImageTransformer2DModel",
            "HeliosTransformer3DModel",
            "HunyuanDiT2DControlNetModel",
            "HunyuanDiT2DModel",
            "HunyuanDiT2DMultiControlNetModel",
            "JoyImageEditPlusTransformer3DModel",
            "JoyImageEditTransformer3DModel",
            "Kandinsky5Transformer3DModel",
            "Kandinsky6SRTransformer3DModel",
            "Kandinsky6Transformer3DModel",
            "LongCatAudioDiTTransformer",
            "LuminaNextDiT2DModel",
            "MiniMaxH3Transformer3DModel",
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
            "DiTTransformer2DModel",
            "DreamLiteTransformer2DModel",
            "LatteTransformer3DModel",
            "PixArtTransformer2DModel",
            "PriorTransformer",
            "Transformer2DModel",
            "TransformerTemporalModel",
        ),
        MANY_FORMS,
    ),
    **dict.fromkeys(
        (
            "ControlNetModel",
            "ControlNetUnionModel",
            "ControlNetXSAdapter",
            "MultiControlNetModel",
            "MultiControlNetUnionModel",
            "SparseControlNetModel",
            "UNetControlNetXSModel",
        ),
        UNET,
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
    **dict.fromkeys(("HiDreamImageTransformer2DModel", "NucleusMoEImageTransformer2DModel"), EXPERTS),
    "QwenImage21Transformer2DModel": CACHE,
}

# Those that a reader of the README's table looks for.
WELL_KNOWN = (
    "PixArtTransformer2DModel",
    "DiTTransformer2DModel",
    "Kandinsky5Transformer3DModel",
)

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
    "MotionEncoderResBlock": "convolutions take its time",
    "SD3SingleTransformerBlock": "no released model but a ControlNet without text has it",
}
