"""Transformer models of diffusers whose blocks stay stock, and why; their norms and activations run the ops."""

from __future__ import annotations

NOT_YET = "the block has no description yet"
MANY_FORMS = "BasicTransformerBlock has many forms, by norm_type, and serves UNets"
LINEAR = "linear attention and convolutions take most of its time"
EXPERTS = "a mixture of experts takes most of its time"
CACHE = "its attention keeps keys and values, or segments of its own"

LEFT: dict[str, str] = {
    **dict.fromkeys(
        (
            "AceStepTransformer1DModel",
            "AllegroTransformer3DModel",
            "AnyFlowFARTransformer3DModel",
            "AnyFlowTransformer3DModel",
            "AuraFlowTransformer2DModel",
            "BriaFibo2Transformer2DModel",
            "BriaTransformer2DModel",
            "CogView3PlusTransformer2DModel",
            "CogView4Transformer2DModel",
            "Cosmos3OmniTransformer",
            "CosmosTransformer3DModel",
            "EasyAnimateTransformer3DModel",
            "ErnieImageTransformer2DModel",
            "Flux3Transformer2DModel",
            "GlmImageTransformer2DModel",
            "HeliosTransformer3DModel",
            "HunyuanDiT2DModel",
            "HunyuanImageTransformer2DModel",
            "Ideogram4Transformer2DModel",
            "JoyImageEditPlusTransformer3DModel",
            "JoyImageEditTransformer3DModel",
            "Kandinsky5Transformer3DModel",
            "Kandinsky6SRTransformer3DModel",
            "Kandinsky6Transformer3DModel",
            "Krea2Transformer2DModel",
            "LongCatAudioDiTTransformer",
            "Lumina2Transformer2DModel",
            "LuminaNextDiT2DModel",
            "MiniMaxH3Transformer3DModel",
            "MiniMaxMusic3RVQDepthDecoder",
            "MiniMaxMusic3Transformer1DModel",
            "MochiTransformer3DModel",
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
    **dict.fromkeys(("SanaTransformer2DModel", "SanaVideoTransformer3DModel", "SanaWMTransformer3DModel"), LINEAR),
    **dict.fromkeys(("HiDreamImageTransformer2DModel", "NucleusMoEImageTransformer2DModel"), EXPERTS),
    "QwenImage21Transformer2DModel": CACHE,
}
